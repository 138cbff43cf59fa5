"""Objects come back as they were, and bytes that are none raise ValueError and run nothing."""

from __future__ import annotations

import contextlib
import pickle
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from ptxemu.plain import Codec, NotPlain
from ptxemu.syntax.tree import Imm, Reg, Vec


@dataclass
class Node:
    """Two fields, one of which is not given to the constructor."""

    name: str
    items: list[Any]


class Plain:
    """Attributes without a dataclass; `other` is not kept."""

    PLAIN = ("value",)

    def __init__(self, value: object) -> None:
        self.value, self.other = value, value


KNOWN = {
    *(type(None), bool, int, float, str, bytes, tuple, list, set, frozenset, dict, range),
    *(Node, Plain, Reg, Imm, Vec),
}
CODEC = Codec((Node, Plain, Reg, Imm, Vec))
VALUES = [
    *(None, True, 0, -1, 2**80, 1.5, float("inf"), -0.0, "", "word \ud800 \0", b"", b"\0\xff"),
    *((), [], set(), frozenset(), {}, range(3), range(9, 1, -2)),
    *([1, 2, -3], [2**31, 1], [True, 1, 1.0], (1, (2, [3, "x"])), {1: "a", "1": [], (1,): None}),
    *({1, "a", (2,)}, frozenset({b"x"}), [[], [], ()], [{"x"}, {"x"}]),
    *(Node("n", [Node("m", [1])]), Vec((Reg("%r1"), None, Imm(1.0, 32), Imm(1)))),
    [set(map(str, range(n, n + 20))) for n in range(9)],  # each nearly the one before
    [frozenset(map(str, range(n, n + 20))) for n in (0, 1, 1, 7)],
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=[type(value).__name__ for value in VALUES])
def test_it_comes_back(value: Any) -> None:
    again = CODEC.loads(CODEC.dumps(value))
    assert repr(again) == repr(value) or again == value
    assert _types(again) == _types(value)


def _classes(value: Any) -> Iterator[type]:
    """Of a value and of all that is in it."""
    yield type(value)
    inside: Any = value if isinstance(value, tuple | list | set | frozenset) else ()
    if isinstance(value, dict):
        inside = [*value, *value.values()]
    for item in (*inside, *getattr(value, "__dict__", {}).values()):
        yield from _classes(item)


def _types(value: Any) -> Any:
    if isinstance(value, dict):
        value = [*value.items()]
    if isinstance(value, tuple | list):
        return type(value), [_types(item) for item in value]
    return type(value)


def test_one_object_stays_one() -> None:
    """And two that are equal stay two, where they can be changed."""
    node, names = Node("n", []), {"%r1"}
    first, second, third, fourth = CODEC.loads(CODEC.dumps([node, node, Node("n", []), names]))
    assert first is second
    assert first == third is not first
    assert fourth == names


def test_what_is_not_named_is_not_kept() -> None:
    again = CODEC.loads(CODEC.dumps(Plain((1, "x"))))
    assert vars(again) == {"value": (1, "x")}


@pytest.mark.parametrize("value", [object(), len, [Callable], {1: {2}, 3: complex(1)}, Node])
def test_other_classes_are_refused(value: Any) -> None:
    with pytest.raises(NotPlain):
        CODEC.dumps(value)


def test_equal_values_give_equal_bytes() -> None:
    sets = [{str(n) for n in order} for order in (range(50), reversed(range(50)))]
    assert CODEC.dumps(sets[0]) == CODEC.dumps(sets[1])


def test_a_pickle_is_no_text() -> None:
    with pytest.raises(ValueError, match="not plain objects"):
        CODEC.loads(pickle.dumps([1, 2, 3]))


@pytest.mark.parametrize("seed", range(20))
def test_damage_raises_or_gives_known_objects(seed: int) -> None:
    """Every byte of a small text, changed and cut."""
    whole = CODEC.dumps(VALUES[seed:])
    order = random.Random(seed)
    for at in range(len(whole)):
        data = bytearray(whole)
        data[at] = order.randrange(256)
        for damaged in (bytes(data), bytes(data[:at])):
            with contextlib.suppress(ValueError):
                assert {*_classes(CODEC.loads(damaged))} <= KNOWN
