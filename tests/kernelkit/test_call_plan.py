"""Plans of a small problem: the calls that they serve, what they keep, what they refuse."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kernelkit.call.prepared import Plan
from tests.kernelkit.test_operator import SCALED, Arguments, Bias, run, same
from tests.kernelkit.test_tape import held_by, matrix, odd

MOVES = ("x", "factors")


def plan_of(**fields) -> Plan:
    return Plan(SCALED, fields, moves=MOVES, results=("out",))


def test_a_plan_serves_other_tensors_of_its_layouts():
    """A plan keeps the tensors that its calls do not pass; their contents may change."""
    row = torch.ones(8)
    plan = plan_of(x=matrix(), bias=Bias(row, 2), factors=matrix())
    for number in range(3):
        row.fill_(number)
        x, factors, out = matrix(), matrix(), matrix()
        expected = run(Arguments(x, Bias(row, 2), factors=factors))
        assert same(plan(x, factors), expected)
        assert same(plan(factors=factors, x=x), expected)
        results = plan(x, factors=factors, out=out)
        assert results[0] is out
        assert same(results, expected)


def test_what_stays_and_scratch_belong_to_the_plan():
    """Results do not belong to the plan: they are new, unless the plan has no names for them."""
    plan = plan_of(x=matrix())
    first, second = plan(matrix()), plan(matrix())
    assert first[0].data_ptr() != second[0].data_ptr()
    assert first[2] is second[2]  # it has no elements
    (zeros,) = [tensor for tensor in held_by(plan._tape) if tensor.dtype == torch.int32]
    zeros += 1  # shows which calls share them
    x = matrix()
    out, integers, _ = plan(x)
    assert torch.equal(integers, out.view(torch.int32) + 1)
    own = Plan(SCALED, {"x": matrix()}, moves=MOVES)
    assert own(x)[0] is own(x)[0] is own.made[0]
    assert own(x)[1].data_ptr() == own.made[1].data_ptr()
    assert same(own(x), run(Arguments(x)))


REFUSED = {
    "shape": ([matrix(4, 8), matrix()], {}, "x is"),
    "strides": ([matrix(), matrix(3, 16)[:, :8]], {}, "factors is"),
    "dtype": ([matrix(), matrix().int()], {}, "factors is"),
    "device": ([matrix(), matrix().to("meta")], {}, "factors is"),
    "result": ([matrix(), matrix()], {"out": matrix(2, 8)}, "out is"),
    "result at an odd address": ([matrix(), matrix()], {"out": odd((3, 8))}, "multiples of 16"),
    "address": ([odd((3, 8)), matrix()], {}, "x at 0x"),
    "missing": ([matrix()], {}, "1 tensors: planned with x, factors, out"),
    "none": ([matrix()], {"factors": None}, "1 tensors"),
    "one more": ([matrix(), matrix(), matrix()], {}, "2 tensors"),
    "another": ([matrix(), matrix()], {"row": matrix()}, "and row"),
    "twice": ([matrix(), matrix()], {"x": matrix()}, "and x"),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_plan_refuses_what_it_was_not_made_for(mode):
    """This holds in every mode of torch, also if a plan checks more closely since the mode
    differs."""
    plan = plan_of(x=matrix(), factors=matrix())
    with mode():
        for _ in range(2):
            for name, (tensors, given, words) in REFUSED.items():
                with pytest.raises(ValueError) as refused:
                    plan(*tensors, **given)
                assert words in str(refused.value), name
            plan(matrix(), matrix())


NOT_PLAIN = {
    "nested": (lambda x: torch.nested.nested_tensor([x, x]), "a nested tensor"),
    "jagged": (lambda x: torch.nested.nested_tensor([x], layout=torch.jagged), "a nested tensor"),
    "sparse": (torch.Tensor.to_sparse, "a sparse_coo tensor"),
    "negated": (torch._neg_view, "lazily negated"),
    "fake": (lambda x: FakeTensorMode().from_tensor(x), "FakeTensor without memory"),
    "functional": (torch._to_functional_tensor, "a functional tensor"),
    "grad": (lambda x: x.requires_grad_(), "requires grad"),
}


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_a_plan_refuses_what_is_no_plain_tensor(kind, gpu):
    """The check comes before torch's guards, which end the process for a nested tensor. It also
    applies if values are on a GPU."""
    plan = plan_of(x=matrix(), factors=matrix())
    plan._tape.gpu = 0 if gpu else None
    make, words = NOT_PLAIN[kind]
    for inputs, given, name in (
        ((make(matrix()), matrix()), {}, "x"),
        ((matrix(), make(matrix())), {}, "factors"),
        ((matrix(), matrix()), {"out": make(matrix())}, "out"),
    ):
        with pytest.raises((TypeError, NotImplementedError), match=f"{name} .*{words}"):
            plan(*inputs, **given)


def test_a_plan_refuses_to_be_traced():
    """Tracing would lose the launch."""
    plan = plan_of(x=matrix(), factors=matrix())
    with pytest.raises(NotImplementedError, match="a plan cannot be traced"):
        torch.jit.trace(lambda *given: plan(*given)[0], (matrix(), matrix()), check_trace=False)


def test_a_plan_refuses_what_torch_func_makes_of_tensors():
    plan = plan_of(x=matrix(), factors=matrix())
    x = matrix()
    with pytest.raises(TypeError, match=r"x is a torch\.func tensor"):
        torch.func.vmap(lambda row: plan(row, x)[0])(x[None])
    with pytest.raises(NotImplementedError, match="factors has a tangent"):
        torch.func.jvp(lambda factors: plan(x, factors)[0], (x,), (x,))


def test_a_plan_looks_at_grad_in_the_mode_of_each_call():
    """The mode in which the plan was made or called last does not matter."""

    def leaf():
        return matrix().requires_grad_()

    with torch.no_grad():
        plan = plan_of(x=leaf(), factors=matrix())
    for _ in range(2):
        for given in ((leaf(), matrix()), (matrix(), leaf())):
            with pytest.raises(NotImplementedError, match="requires grad"):
                plan(*given)
            with torch.no_grad():
                plan(*given)
        plan(matrix(), matrix())


def test_a_plan_refuses_tensors_that_were_one():
    x = matrix()
    plan = plan_of(x=x, factors=x)
    y = matrix()
    assert same(plan(y, y), run(Arguments(y, factors=y)))
    with pytest.raises(ValueError, match="x and factors lay 0 bytes apart in the plan"):
        plan(x, y)


def test_a_plan_takes_no_result_that_is_not_allocated_for_itself():
    plan = Plan(SCALED, {"x": matrix()}, moves=MOVES, results=("out", "integers"))
    with pytest.raises(ValueError, match="integers cannot be given"):
        plan(matrix(), integers=matrix().int())


def test_a_plan_needs_what_can_be_repeated(monkeypatch):
    elsewhere = matrix()
    monkeypatch.setattr(SCALED, "_run", lambda given: (given.x + elsewhere,))
    with pytest.raises(ValueError, match="a plan cannot repeat"):
        plan_of(x=matrix())


def test_a_plan_keeps_no_memory_of_what_each_call_is_given():
    memory, row = np.zeros((3, 8), np.float32), np.zeros(8, np.float32)
    alive, held = weakref.ref(memory), weakref.ref(row)
    plan = plan_of(x=torch.from_numpy(memory), bias=Bias(torch.from_numpy(row)))
    plan(torch.from_numpy(memory))
    del memory, row
    gc.collect()
    assert alive() is None
    assert held() is not None
    plan(matrix())
