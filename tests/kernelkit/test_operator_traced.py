"""Operators of a small problem, as callers and tracers see them."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from kernelkit.call.operator import Operator
from tests.kernelkit.test_operator import SCALED, Arguments, empty, run, same
from tests.kernelkit.test_tape import matrix


def test_results_come_in_the_promised_number():
    given = {"x": matrix()}
    for count in (1, 2, 3):
        operator = Operator(
            f"kernelkit_tests_{count}",
            Arguments,
            lambda given, count=count: run(given)[:count],
            lambda given, count=count: empty(given)[:count],
            results=count,
        )
        out, expected = matrix(), run(Arguments(**given))
        for found in (operator(given), operator(given | {"out": out})):
            found = [found] if count == 1 else found
            assert len(found) == count
            assert same(found, expected)
        assert found[0] is out


@pytest.mark.parametrize("given", [{}, {"factor": 3.0}, {"bias_row": torch.ones(8)}])
def test_opcheck(given):
    opcheck(SCALED.default, (matrix(),), given)
    opcheck(SCALED.written, (matrix(),), {"out": matrix(), **given})


def test_fake_tensors_know_shapes():
    with FakeTensorMode():
        for out in (None, torch.empty(3, 16)[:, :8]):
            results = SCALED({"x": torch.empty(3, 8)} | ({} if out is None else {"out": out}))
            assert [t.dtype for t in results] == [torch.float32, torch.int32, torch.float32]
            assert [tuple(t.shape) for t in results] == [(3, 8), (3, 8), (0, 8)]
        assert results[0] is out


def test_fake_tensors_go_with_fake_ones():
    fake = FakeTensorMode().from_tensor(matrix())
    for given in ({"x": fake, "factors": matrix()}, {"x": matrix(), "out": fake}):
        with pytest.raises(TypeError, match="is a FakeTensor: either all tensors are, or none is"):
            SCALED(given)


def test_compiled_code_calls_the_kernel():
    def step(x, out):
        return SCALED({"x": x + 1, "out": out})[1] + SCALED({"x": x})[1], out * 2

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    x = matrix()
    assert same(compiled(x, matrix()), step(x, matrix()))


def test_there_is_no_backward():
    x = matrix().requires_grad_()
    opcheck(SCALED.default, (x,), test_utils="test_autograd_registration")
    with pytest.raises(NotImplementedError, match="x requires grad"):
        SCALED({"x": x})
    with pytest.raises(NotImplementedError, match="no backward"):
        SCALED.default(x)[0].sum().backward()
