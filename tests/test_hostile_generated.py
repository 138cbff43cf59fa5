"""Generated wrong calls: they are refused with an error that names what is wrong, before anything
is compiled, launched or changed; or they reach the compiler, like right calls.
"""

from __future__ import annotations

import collections
import dataclasses
import inspect
import typing
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import pytest
import torch

import fmha
import gqa_lowlatency
import kvcache
import mla
import moe
import q8_0
from blackwell_engines import parallel
from kernelkit.compile import compiler as kernel_compile
from tests.support.hostile.bases import BASES
from tests.support.hostile.calls import BARE, REFUSALS
from tests.support.hostile.generator import Call, calls
from tests.support.hostile.plain import Reached, tensors

OF_A_TEST = 100
# Names of parts of an argument in messages.
ALSO = {
    "rope": ("cos", "sin"), "of_layer": ("map",), "query": ("q", "q_scales", "weights"),
}  # fmt: skip


@pytest.fixture
def reaching(monkeypatch):
    """Raise `Reached` instead of compiling."""

    def refuse(*_: object) -> None:
        raise Reached

    monkeypatch.setattr(kernel_compile, "_compiled", {})
    monkeypatch.setattr(kernel_compile, "_make", refuse)


def outcome(call: Call) -> tuple[str, str]:
    """Return ('refused' or 'accepted', message), or ('wrong', reason) if the call does something
    forbidden."""
    before = [(tensor, _bytes(tensor)) for tensor in _memory(call.given)]
    try:
        if call.raised is not None:
            raise call.raised
        call.base.function(**call.given)
    except Reached:
        found = "accepted", ""
    except REFUSALS as error:
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
    """Return what is wrong with the end of a call, '' for nothing."""
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
    """Yield the tensors that have their own bytes on the CPU."""
    for _, tensor in tensors(value):
        plain = tensor.layout is torch.strided and not tensor.is_nested and tensor.is_cpu
        if plain and tensor.untyped_storage().nbytes():
            yield tensor


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Copy the memory of a tensor's storage."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage).clone()


@pytest.mark.parametrize("name", BASES)
def test_a_call_that_is_right_is_accepted(name, reaching):
    """Otherwise its changes could be refused for another reason."""
    base = BASES[name]
    kind, text = outcome(Call(base, base.arguments(), (), "is right", False, False))
    assert kind == "accepted", text


@pytest.mark.parametrize("seed", range(100))
def test_calls_that_are_wrong_are_refused_by_name(seed, reaching):
    found = [(str(call), complaint(call)) for call in calls(BASES, seed, OF_A_TEST)]
    wrong = [f"{call}\n    {words}" for call, words in found if words]
    assert not wrong, "\n".join((f"{len(wrong)} of {len(found)} calls:", *wrong))


def test_the_calls_are_of_many_kinds(reaching):
    """At least a third is refused, among them calls of every function."""
    drawn = [*calls(BASES, 1, 6 * len(BASES))]
    refused = collections.Counter(call.base.name for call in drawn if outcome(call)[0] == "refused")
    assert refused.total() > 100
    assert refused.keys() == BASES.keys()


PACKAGES = (fmha, mla, gqa_lowlatency, kvcache, moe, q8_0, parallel)
WITHOUT = {  # names without a base, since users pass them no arguments
    "Admission": "a result", "Copy": "a result", "Permutation": "a result", "Plan": "a result",
    "Request": "a result", "StepView": "a result", "Step": "a result", "Work": "a result",
    "Pool": "an enum", "BlockFormat": "a row of FORMATS",
    "ring_attention": "needs ranks, and is fmha.attention on each",
    "Mod": "a result", "BlockLists": "tests/fmha/test_masks.py makes wrong ones",
    "block_lists": "takes a mask of another library; tests/fmha/test_masks.py",
    "trace_mask_mod": "takes a function; tests/fmha/test_mods.py",
    "trace_score_mod": "takes a function; tests/fmha/test_mods.py",
}  # fmt: skip


def public(package: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield names and values of a package's functions and classes, without errors and without types
    of options, which are part of functions' signatures."""
    for name in package.__all__:
        value = getattr(package, name)
        error = isinstance(value, type) and issubclass(value, Exception)
        if callable(value) and not error and not typing.is_typeddict(value):
            yield name, value


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_all_that_is_public_has_a_base(package):
    """A base calls each function; each class is called, or is the type of an argument."""
    functions = {inspect.unwrap(base.function) for base in BASES.values()}
    kinds = {type(value) for base in BASES.values() for value in _values(base.arguments())}
    missing = [
        name
        for name, value in public(package)
        if inspect.unwrap(value) not in functions and value not in kinds and name not in WITHOUT
    ]
    assert not missing, (
        f"{', '.join(missing)}: a call that is right, in tests/support/hostile/bases.py"
    )


def test_nothing_is_left_out_that_is_gone():
    names = {name for package in PACKAGES for name, _ in public(package)}
    assert names >= WITHOUT.keys()


def _values(value: Any) -> Iterator[Any]:
    """Yield a value and everything inside it."""
    yield value
    parts: Iterable[Any] = ()
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, tuple | list):
        parts = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = (getattr(value, field.name) for field in dataclasses.fields(value))
    for part in parts:
        yield from _values(part)
