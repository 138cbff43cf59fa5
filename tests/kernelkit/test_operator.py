"""Operators of a small problem: when a call is repeated, that it leaves nothing to later ones, and
which modes see it.
"""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kernelkit.call import front
from kernelkit.call import operator as module
from kernelkit.call.front import forget, layouts
from kernelkit.call.launch import Target, launch
from kernelkit.call.operator import Operator
from kernelkit.call.tape import zeros_that_stay
from tests.kernelkit.scale_kernel import compile_scale
from tests.kernelkit.test_tape import held_by, matrix, odd


@dataclass(frozen=True)
class Bias:
    """A row that is added to each row of x."""

    row: torch.Tensor
    times: int = 1


@dataclass(frozen=True)
class Arguments:
    """Arguments of out = factor * (x + bias), fp32 [rows, 8]."""

    x: torch.Tensor
    bias: Bias | None = None
    out: torch.Tensor | None = None
    factors: torch.Tensor | None = None
    factor: float = 2.0
    kind: str = "plain"


def run(given: Arguments) -> tuple[torch.Tensor, ...]:
    """Return (out, out as integers elsewhere, rows): a launch between torch operations."""
    if given.factor < 0:
        raise ValueError(f"factor {given.factor}: at least 0")
    if given.kind == "read" and given.x.sum().item() > 0:
        given = Arguments(-given.x)
    results = empty(given)
    x = given.x if given.bias is None else given.x + given.bias.row * given.bias.times
    if given.factors is not None:
        x = x * given.factors
    where = Target("emulate", "sm_90a")
    launch(compile_scale("sm_90a"), (x, results[0], given.factor), where, x.device)
    rows = zeros_that_stay(len(x), x)
    results[1].copy_(results[0].view(torch.int32) + rows[:, None])
    return results


def empty(given: Arguments) -> tuple[torch.Tensor, ...]:
    """Allocate the results without writing them."""
    x = given.x
    out = x.new_empty(x.shape) if given.out is None else given.out
    return out, x.new_empty(x.shape).view(torch.int32), x.new_empty(0, 8)


# `run` may overwrite its input: the tests of tapes let the two overlap.
SCALED = Operator("kernelkit_tests_scaled", Arguments, run, empty, results=3, pools=True)


def recalled(**fields):
    """Call as on a GPU, in the emulator."""
    flat = SCALED.schema.flat(fields)
    names = [leaf.name for leaf in SCALED.schema.tensors if "out" in fields or leaf.name != "out"]
    tensors = [flat.pop(name, None) for name in names]
    return SCALED.recall(names, tensors, flat)


def same(results, expected) -> bool:
    return all(map(torch.equal, results, expected))


@pytest.fixture(autouse=True)
def kept():
    """The tapes of this thread, without those of other tests."""
    forget()
    yield SCALED.tapes.known
    forget()


@pytest.fixture
def runs(monkeypatch):
    """Arguments of calls that reached the operator's function."""
    seen = []
    monkeypatch.setattr(SCALED, "_run", lambda given: seen.append(given) or run(given))
    return seen


# ---- when a call is repeated


def calls():
    """Yield calls that each need a separate tape."""
    row = torch.randn(8)
    yield {"x": matrix()}
    yield {"x": matrix(5, 8)}
    yield {"x": matrix(3, 16)[:, :8]}
    yield {"x": matrix(), "bias": Bias(row)}
    yield {"x": matrix(), "bias": Bias(row, 3)}
    yield {"x": matrix(), "factors": row}
    yield {"x": matrix(), "factors": row[:1]}
    yield {"x": matrix(), "factors": matrix()}
    yield {"x": matrix(), "factor": 3.0}
    yield {"x": matrix(), "kind": "other"}
    yield {"x": matrix(), "factor": 3.0, "kind": "other"}
    yield {"x": matrix(), "out": matrix()}
    yield {"x": matrix(), "out": matrix(3, 16)[:, :8]}


def test_a_tape_serves_calls_of_its_layouts_and_options(runs, kept):
    for number, call in enumerate(calls(), 1):
        recalled(**call)
        assert len(runs) == len(kept) == number, call
    for call in calls():  # other tensors
        assert same(recalled(**call), run(Arguments(**call)))
    assert len(runs) == number


def test_layouts_are_all_but_addresses_and_contents():
    x = matrix()
    assert layouts([x]) == layouts([x + 1])
    for other in (x[:2], x.T, x.half(), x.to("meta"), matrix(3, 16)[:, :8]):
        assert layouts([x]) != layouts([other])


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Calls are treated as those with CUDA tensors, in the emulator."""
    monkeypatch.setattr(module, "_on_gpu", lambda tensors: True)


@pytest.fixture
def dispatched(as_on_a_gpu, monkeypatch):
    """Calls that went through torch's dispatcher."""
    seen, dispatch = [], SCALED._dispatch
    monkeypatch.setattr(SCALED, "_dispatch", lambda flat: seen.append({**flat}) or dispatch(flat))
    return seen


def test_the_dispatcher_is_asked_once(runs, dispatched):
    """Calls are those to which the dispatcher adds nothing."""
    for number, (call, *others) in enumerate(zip(calls(), calls(), calls(), strict=True), 1):
        SCALED(call)
        for other in others:  # other tensors
            results = SCALED(other)
            assert same(results, run(Arguments(**other)))
            assert results[0] is other.get("out", results[0])
        assert len(runs) == len(dispatched) == number, call


def test_the_dispatcher_is_asked_again_for_what_is_laid_out_otherwise(runs, dispatched):
    """Shapes and options may be equal: strides, dtypes, one tensor twice, and alignment
    count, too."""
    x = matrix()
    for given, times in (
        ({"x": x, "factors": matrix()}, 1),
        ({"x": matrix(), "factors": matrix()}, 1),
        ({"x": matrix(), "factors": matrix(3, 16)[:, :8]}, 2),
        ({"x": matrix(), "factors": matrix().half()}, 3),
        ({"x": x, "factors": x}, 4),
        ({"x": x.clone(), "factors": x}, 5),
        ({"x": x, "factors": odd((3, 8))}, 6),
    ):
        assert same(SCALED(given), run(Arguments(**given)))
        assert len(dispatched) == times
    with torch.no_grad(), pytest.raises(TypeError, match="factor is True"):
        SCALED({"x": x, "factor": True})
    SCALED({"x": x, "factor": 1.0})
    with pytest.raises(TypeError, match="factor is True"):
        SCALED({"x": x, "factor": True})
    with pytest.raises(NotImplementedError, match="x requires grad"):
        SCALED({"x": matrix().requires_grad_(), "factor": 1.0})


class Watch(TorchDispatchMode):
    """A mode that counts our operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += func is SCALED.default
        return func(*args, **kwargs or {})


class WatchFunctions(TorchFunctionMode):
    """A mode that counts functions."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen += func is SCALED.default
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("mode", [Watch, WatchFunctions])
def test_a_mode_sees_every_call(mode, as_on_a_gpu):
    """Calls that are known, or become known within the mode, are included."""
    for before in (1, 0):
        x = matrix(before + 2, 8)
        for _ in range(2 * before):
            SCALED({"x": x})
        with mode() as watch:
            for _ in range(3):
                SCALED({"x": x})
        assert watch.seen == 3


def test_a_profiler_sees_every_call(as_on_a_gpu):
    for _ in range(2):
        SCALED({"x": matrix()})
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        SCALED({"x": matrix()})
    assert SCALED.default.name() in {event.name for event in profiler.events()}


class Subclass(torch.Tensor):
    """Results of operators have this class, too."""


def test_the_dispatcher_is_asked_for_what_is_no_plain_tensor(as_on_a_gpu):
    """A subclass, a lazy view, a transformation or a tracer gets its own result."""
    x = matrix()
    expected = 2 * x

    def scale(x):
        return SCALED({"x": x})[0]

    def plain():
        assert torch.equal(scale(x), expected)

    def subclass():
        assert type(scale(x.as_subclass(Subclass))) is Subclass

    def negated():
        assert torch.equal(scale(torch._neg_view(x)), -expected)

    def fake():
        with FakeTensorMode() as mode:
            assert isinstance(scale(mode.from_tensor(x)), FakeTensor)
            with pytest.raises(AssertionError, match="FakeTensor"):
                scale(x)

    def traced():
        graph = make_fx(scale, tracing_mode="symbolic")(x).graph
        assert SCALED.default in [node.target for node in graph.nodes]

    def traced_by_jit():
        graph = torch.jit.trace(scale, (x,), check_trace=False).graph
        assert SCALED.default.name().partition(".")[0] in str(graph)

    step = torch.compile(scale, backend="aot_eager", fullgraph=True)

    def compiled():
        assert torch.equal(step(x), expected)

    def nested():
        with pytest.raises(TypeError, match="nested"):
            scale(torch.nested.nested_tensor([x, x]))

    def tangent():
        with pytest.raises(NotImplementedError, match="x has a tangent"):
            torch.func.jvp(scale, (x,), (x,))

    cases = (plain, subclass, negated, fake, traced, traced_by_jit, compiled, nested, tangent)
    for before in cases:
        for case in (before, before, *cases):
            case()


def test_the_dispatcher_is_asked_each_time_within_transformations(dispatched):
    """Plain tensors are included: their results may not be plain there."""
    x = matrix()
    for times in (1, 1, 2, 3, 4):
        if times == 1:
            SCALED({"x": x})
        else:
            torch.func.vmap(lambda row: SCALED({"x": x})[0] + row)(x)
        assert len(dispatched) == times
    with FakeTensorMode(), pytest.raises(AssertionError, match="FakeTensor"):
        SCALED({"x": x})
    assert len(dispatched) == 5


def test_known_calls_of_inference_and_of_other_modes_of_autograd(dispatched):
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad, torch.inference_mode):
        with mode():
            for _ in range(3):
                x = matrix()
                results = SCALED({"x": x})
                assert same(results, run(Arguments(x)))
                assert not results[0].requires_grad
                assert results[0].is_inference() == torch.is_inference_mode_enabled()
    assert len(dispatched) < 12


def test_the_oldest_tape_leaves(runs, kept, monkeypatch):
    monkeypatch.setattr(front, "KEPT", 2)
    first, second, third, *_ = calls()
    for call in (first, second, first, third, first):
        recalled(**call)
    assert len(runs) == 3
    recalled(**second)
    assert (len(runs), len(kept)) == (4, 2)


def test_each_thread_has_its_own(runs):
    for _ in range(2):
        thread = threading.Thread(target=recalled, kwargs={"x": matrix()})
        thread.start()
        thread.join()
        recalled(x=matrix())
    assert len(runs) == 3


def test_everything_is_checked_at_each_call_on_the_cpu(runs, kept):
    for _ in range(2):
        SCALED({"x": matrix()})
    assert len(runs) == 2
    assert not kept


def test_what_is_refused_or_read_is_not_kept(kept):
    for _ in range(2):
        with pytest.raises(ValueError, match="factor -1"):
            recalled(x=matrix(), factor=-1.0)
        x = torch.ones(3, 8)
        assert [recalled(x=sign * x, kind="read")[0].max() for sign in (1, -1)] == [-2, -2]
    assert not kept


def test_other_addresses_need_another_tape(runs, kept):
    """The changes are one tensor twice, and less alignment; then the first addresses again."""
    x, y = matrix(), matrix()
    for given in ((x, y), (x, x), (x, y), (odd((3, 8), 4), y), (x, y), (odd((3, 8)), y)):
        wanted = run(Arguments(given[0].clone(), factors=given[1].clone()))
        try:
            assert same(recalled(x=given[0], factors=given[1]), wanted)
        except ValueError:  # an address that the kernel does not accept
            assert given[0].data_ptr() % 16
    # No tape requires x and y to differ, so the first one serves until they have been the same.
    assert len(kept) == 1
    assert len(runs) == 2


def test_what_is_written_lies_apart_from_what_is_read(runs, dispatched):
    """Results may also have the distance of the call that was checked; other calls are checked
    again."""
    memory = matrix(10, 8)
    for (x, out), times in (
        ((memory[:3], memory[6:9]), 1),
        ((matrix(), matrix()), 1),
        ((memory[3:6], memory[:3]), 1),
        ((memory[:3], memory[2:5]), 2),
        ((memory[4:7], memory[6:9]), 2),
        ((memory[2:5], memory[:3]), 3),
        ((memory[:3], memory[:3]), 4),
        ((matrix(), matrix()), 5),
    ):
        SCALED({"x": x, "out": out})
        assert len(runs) == len(dispatched) == times


def test_nothing_of_an_earlier_call_is_left(runs):
    """Neither addresses nor contents remain."""
    for number in (1.0, 3.0, 0.5):
        row, factors = torch.full((8,), number), torch.full((3, 1), number)
        given = {"x": matrix(), "bias": Bias(row), "factors": factors}
        for change in (0.0, 1.0):
            row.fill_(number + change)
            assert same(recalled(**given), run(Arguments(**given))), number
    assert len(runs) == 1


def test_a_kept_tape_holds_no_tensor_and_keeps_no_memory_alive(kept):
    memory = np.zeros((3, 8), np.float32)
    alive = weakref.ref(memory)
    results = recalled(x=torch.from_numpy(memory), bias=Bias(torch.ones(8)), out=matrix())
    (call,) = kept.values()
    assert len(held_by([call.tape, *results])) == len(results) == 3
    del memory
    gc.collect()
    assert alive() is None


@dataclass(frozen=True)
class Parts:
    """Arguments of a sum of parts, with optional weights."""

    parts: tuple[torch.Tensor, ...]
    weights: tuple[torch.Tensor | None, ...]


def run_sum(given: Parts) -> tuple[torch.Tensor, ...]:
    pairs = zip(given.parts, given.weights, strict=True)
    return (sum(part if weight is None else part * weight for part, weight in pairs).clone(),)


SUMMED = Operator("kernelkit_tests_summed", Parts, run_sum, run_sum, results=1)


def test_sequences_of_tensors_are_part_of_a_call():
    """The number of tensors counts, and which are missing."""
    kept, x, row = SUMMED.tapes.known, matrix(), torch.randn(8)
    lists = [([x], [None]), ([x] * 2, [None, row]), ([x] * 2, [row, None]), ([x] * 2, [row] * 2)]
    for number, (parts, weights) in enumerate(lists, 1):
        for _ in range(2):
            parts = [matrix() for _ in parts]
            weights = [weight if weight is None else torch.randn(8) for weight in weights]
            expected = run_sum(Parts(parts, weights))
            assert same(SUMMED.recall(["parts", "weights"], [parts, weights], {}), expected)
            assert torch.equal(SUMMED({"parts": parts, "weights": weights}), *expected)
        assert len(kept) == number
    opcheck(SUMMED.default, ([x, x], [None, row]))
    forget()
