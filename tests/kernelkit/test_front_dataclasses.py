"""The shortcut of public functions that take dataclasses, as `fused_moe` does, call one of two
operators, or return nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kernelkit.call import front as cache
from kernelkit.call import operator as module
from kernelkit.call.front import forget, fronted
from kernelkit.call.operator import Operator
from tests.kernelkit.test_front import CALLS, expected, scaled, whole_ways
from tests.kernelkit.test_operator import SCALED, Arguments, run
from tests.kernelkit.test_tape import matrix


@dataclass(frozen=True)
class Box:
    """An option with two fields."""

    content: Any
    other: Any = None


@dataclass(frozen=True)
class Single:
    """An option with one field."""

    content: Any


@dataclass(frozen=True)
class Into:
    """Arguments of `INTO`."""

    x: torch.Tensor
    row: torch.Tensor


def write(given: Into) -> tuple[()]:
    """Write the result of `SCALED` to a tensor."""
    run(Arguments(given.x, out=given.row))
    return ()


INTO = Operator("test_front_into", Into, write, lambda given: (), results=0, writes=("row",))


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """Calls are treated as those with CUDA tensors, in the emulator; nothing is known from other
    tests."""
    monkeypatch.setattr(module, "_on_gpu", lambda tensors: True)
    forget()
    yield
    forget()


def test_a_dataclass_is_its_type_and_fields():
    given = [Box(1), Single(1), (1, None), Box(1, 1), Single(Single(1)), Single((1,))]
    for ways in (1, 0):
        for more in given:
            assert whole_ways(lambda more=more: scaled(matrix(), more=more)) == ways, more


EQUAL = [(Box(1, 2), Box(1, 2.0)), (Box(0.0), Box(-0.0)), ((Single(1),), (Single(True),))]


@pytest.mark.parametrize(("one", "other"), EQUAL, ids=str)
def test_what_is_equal_is_not_the_same(one, other):
    assert one == other
    for more in (one, other):
        ways = [whole_ways(lambda more=more: scaled(matrix(), more=more)) for _ in range(2)]
        assert ways == [1, 0], more


@pytest.mark.parametrize("more", [Box({2}), Single(b"1")], ids=str)
def test_what_cannot_be_compared_goes_the_whole_way(more):
    for _ in range(2):
        assert whole_ways(lambda: scaled(matrix(), more=more)) == 1


def test_tensors_of_dataclasses_are_those_of_the_call():
    @fronted()
    def boxed(box, times):
        CALLS.append({})
        return SCALED({"x": box.content.content, "factors": box.other, "factor": times.content})[0]

    for ways in (1, 0):
        x, factors = matrix(), matrix()
        box = Box(Single(x), factors)
        assert whole_ways(lambda box=box: boxed(box, Single(3.0))) == ways
        assert torch.equal(boxed(box, Single(3.0)), expected(x, factors, factor=3.0)[0])
    assert whole_ways(lambda: boxed(Box(Single(matrix(5, 8)), None), Single(3.0))) == 1
    assert whole_ways(lambda: boxed(box, Single(4.0))) == 1


def test_a_function_of_one_of_two_operators():
    """The other operator writes, and returns nothing."""

    @fronted()
    def either(x, out=None):
        CALLS.append({})
        return SCALED({"x": x})[0] if out is None else INTO({"x": x, "row": out})

    for ways in (1, 0):
        x, out = matrix(), matrix()
        assert whole_ways(lambda x=x, out=out: either(x, out)) == ways
        assert torch.equal(out, expected(x)[0])
        assert either(x, out) is None
        assert whole_ways(lambda x=x: either(x)) == ways
        assert torch.equal(either(x), expected(x)[0])
    assert cache._listening.served is None
