"""Generated calls that somebody gets wrong: refused with an error that names what is wrong, before
anything is compiled, launched or changed; or they reach the compiler, as calls that are right do.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kernelkit import compile as kernel_compile
from tests.hostile_bases import BASES
from tests.hostile_calls import BARE, NAMED
from tests.hostile_generator import Call, calls
from tests.hostile_plain import Reached, tensors

OF_A_TEST = 100
# What messages call parts of an argument.
ALSO = {"rope": ("cos", "sin"), "of_layer": ("map",)}


@pytest.fixture
def reaching(monkeypatch):
    """Raise `Reached` instead of compiling."""

    def refuse(*_: object) -> None:
        raise Reached

    monkeypatch.setattr(kernel_compile, "_compiled", {})
    monkeypatch.setattr(kernel_compile, "_make", refuse)


def outcome(call: Call) -> tuple[str, str]:
    """('refused' or 'accepted', the message), or ('wrong', why) for what a call may not do."""
    before = [(tensor, _bytes(tensor)) for tensor in _memory(call.given)]
    try:
        if call.raised is not None:
            raise call.raised
        call.base.function(**call.given)
    except Reached:
        found = "accepted", ""
    except NAMED as error:
        found = "refused", f"{type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001 - any other is a finding
        return "wrong", f"an error of another kind, {type(error).__name__}: {error}"
    else:
        found = "accepted", "returned"
    for tensor, content in before:
        if found[0] == "refused" and not torch.equal(_bytes(tensor), content):
            return "wrong", f"a tensor was changed before: {found[1]}"
    return found


def complaint(call: Call) -> str:
    """What is wrong with how a call ends, '' for nothing."""
    kind, text = outcome(call)
    if kind == "wrong":
        return text
    if kind == "accepted":
        return "accepted in silence" if call.refused else ""
    if BARE.search(text):
        return f"not in our words: {text}"
    names = {part for path in call.paths for part in path.split("/") if not part.isdigit()}
    names |= {also for name in names for also in ALSO.get(name, ())}
    if call.typed and not any(name in text for name in names):
        return f"the argument is not named: {text}"
    return ""


def _memory(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that have bytes of their own on the CPU."""
    for _, tensor in tensors(value):
        plain = tensor.layout is torch.strided and not tensor.is_nested and tensor.is_cpu
        if plain and tensor.untyped_storage().nbytes():
            yield tensor


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the memory that a tensor is in."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage).clone()


@pytest.mark.parametrize("name", BASES)
def test_a_call_that_is_right_is_accepted(name, reaching):
    """Otherwise its changes would be refused for another reason."""
    base = BASES[name]
    kind, text = outcome(Call(base, base.arguments(), (), "is right", False, False))
    assert kind == "accepted", text


@pytest.mark.parametrize("seed", range(100))
def test_calls_that_are_wrong_are_refused_by_name(seed, reaching):
    found = [(str(call), complaint(call)) for call in calls(BASES, seed, OF_A_TEST)]
    wrong = [f"{call}\n    {words}" for call, words in found if words]
    assert not wrong, "\n".join((f"{len(wrong)} of {len(found)} calls:", *wrong))


def test_the_calls_are_of_many_kinds(reaching):
    """At least a third is refused, and of every function some."""
    drawn = [*calls(BASES, 1, 300)]
    refused = collections.Counter(call.base.name for call in drawn if outcome(call)[0] == "refused")
    assert refused.total() > 100
    assert refused.keys() == BASES.keys()
