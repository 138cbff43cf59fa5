"""The shortcut of a public function: which calls take it, which may not, and what it keeps."""

from __future__ import annotations

import gc
import math
import threading
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from kernelkit.call import front as cache
from kernelkit.call import operator as module
from kernelkit.call.front import forget, fronted
from tests.kernelkit.test_operator import SCALED, Arguments, Subclass, Watch, WatchFunctions, run
from tests.kernelkit.test_tape import held_by, matrix, odd
from tests.support.hostile.calls import freed

HINTS = {"seq_lens": "lengths"}
CALLS: list[dict] = []  # arguments of calls that took no shortcut


@fronted(HINTS)
def scaled(x, factors=None, *, more=None, factor=2.0, pair=None, out=None, all_of_it=False):
    """Return O of `SCALED`, or all results.

    pair: two factors.
    more: ignored.
    """
    if not torch.compiler.is_compiling():  # it would guard the list
        CALLS.append({"x": x, "factors": factors, "factor": factor})
    if type(all_of_it) is not bool:
        raise TypeError(f"all_of_it is {all_of_it!r}, expected bool")
    factor = math.prod(pair) if pair else factor
    results = SCALED({"x": x, "factors": factors, "out": out, "factor": factor})
    return results if all_of_it else results[0]


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """Calls are treated as those with CUDA tensors, in the emulator; nothing is known from other
    tests."""
    monkeypatch.setattr(module, "_on_gpu", lambda tensors: True)
    forget()
    CALLS.clear()
    yield
    forget()


def whole_ways(call) -> int:
    """Count how many calls take no shortcut."""
    before = len(CALLS)
    call()
    return len(CALLS) - before


def expected(x, factors=None, **options):
    return run(Arguments(x.detach(), factors=factors, **options))


# ---- which calls take it


def forms():
    """Yield calls (tensors, options) that all differ."""
    row = torch.randn(8)
    yield (matrix(),), {}
    yield (matrix(5, 8),), {}
    yield (matrix(3, 16)[:, :8],), {}
    yield (matrix(), matrix()), {}
    yield (matrix(), row), {}
    yield (matrix(), None), {}
    yield (), {"factors": row, "x": matrix()}
    yield (), {"factors": matrix(), "x": matrix()}
    yield (matrix(),), {"factor": 3.0}
    yield (matrix(),), {"factor": 0.5}
    yield (matrix(),), {"out": matrix()}
    yield (matrix(), matrix()), {"out": matrix()}
    yield (matrix(),), {"pair": (2.0, 0.25)}
    yield (matrix(),), {"pair": [2.0, 0.75]}
    yield (matrix(),), {"all_of_it": True}
    yield (matrix(),), {"all_of_it": True, "out": matrix(), "factor": 4.0}


def wanted(tensors, options):
    known = {name: options[name] for name in ("factor", "factors", "x") if name in options}
    if "pair" in options:
        known["factor"] = math.prod(options["pair"])
    names = dict(zip(("x", "factors"), tensors, strict=False)) | known
    return expected(**names)


def test_the_function_is_asked_once():
    for (first, options), *others in zip(forms(), forms(), forms(), strict=True):
        assert whole_ways(lambda first=first, options=options: scaled(*first, **options)) == 1
        for tensors, options in others:  # other tensors
            ways = len(CALLS)
            found = scaled(*tensors, **options)
            assert len(CALLS) == ways, options
            results = wanted(tensors, options)
            if options.get("all_of_it"):
                assert type(found) is tuple
                assert all(map(torch.equal, found, results))
            else:
                assert torch.equal(found, results[0])
            if "out" in options:
                assert (found[0] if options.get("all_of_it") else found) is options["out"]


def test_what_nobody_gets_is_not_allocated():
    for all_of_it in (False, True):
        scaled(matrix(), all_of_it=all_of_it)
    tapes = [call.tape for call in scaled.calls.known.values()]
    assert [len(tape.makers) for tape in tapes] == [3, 4]
    assert [len(tape.results) for tape in tapes] == [1, 3]


# ---- which may not


EQUAL = [
    (True, 1), (1, 1.0), (True, 1.0), (0.0, -0.0), (False, 0.0), ((2.0, 1), (2.0, True)),
    ((2.0, 1.0), (2.0, 1)), ([0.0], [-0.0]), ((1, (2,)), (1, (2.0,))),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), EQUAL, ids=str)
def test_what_is_equal_is_not_the_same(one, other):
    """Equal but different values, also in sequences, call the function once each."""
    assert one == other
    for more in (one, other):
        ways = [whole_ways(lambda more=more: scaled(matrix(), more=more)) for _ in range(2)]
        assert ways == [1, 0], more


def test_a_list_is_no_tuple():
    ways = [whole_ways(lambda more=more: scaled(matrix(), more=more)) for more in ((1,), [1], (1,))]
    assert ways == [1, 1, 0]


def test_every_call_on_the_cpu_goes_the_whole_way(monkeypatch):
    monkeypatch.setattr(module, "_on_gpu", lambda tensors: tensors[0].is_cuda)
    for _ in range(2):
        assert whole_ways(lambda: scaled(matrix())) == 1
    assert not scaled.calls.known


def test_a_type_is_refused_also_where_an_equal_value_is_known():
    for _ in range(100):
        scaled(matrix(), all_of_it=True)
    with pytest.raises(TypeError, match="all_of_it is 1, expected bool"):
        scaled(matrix(), all_of_it=1)
    with pytest.raises(TypeError, match="factor is True"):
        scaled(matrix(), factor=True)


@pytest.mark.parametrize(
    "more",
    [SimpleNamespace(), {"a": 1}, np.float32(1), np.ones(2), torch.device("cpu"), b"1", (1, {2})],
    ids=lambda more: type(more).__name__,
)
def test_what_cannot_be_compared_goes_the_whole_way(more):
    for _ in range(2):
        assert whole_ways(lambda: scaled(matrix(), more=more)) == 1


def test_tensors_that_are_laid_out_otherwise():
    """Differences are shapes, strides, dtypes, one tensor twice, and alignment."""
    x, y = matrix(), matrix()
    for tensors, ways in (
        ((x, y), 1),
        ((matrix(), matrix()), 0),
        ((matrix(5, 8), matrix(5, 8)), 1),
        ((x, matrix(3, 16)[:, :8]), 1),
        ((x, y.half()), 1),
        ((x, x), 1),
        ((y, y), 0),
        ((x, y), 1),
        ((x, odd((3, 8))), 1),
    ):
        assert whole_ways(lambda tensors=tensors: scaled(*tensors)) == ways
        assert torch.equal(scaled(*tensors), expected(*tensors)[0])
    with pytest.raises(ValueError, match=r"factors is on|different devices"):
        scaled(x, y.to("meta"))


def test_what_is_written_reaches_into_what_is_read():
    """Such a call always reaches the function, whose checks may refuse it."""
    memory = matrix(10, 8)
    scaled(memory[:3], out=memory[6:9])
    assert whole_ways(lambda: scaled(memory[3:6], out=memory[:3])) == 0
    for begin in (1, 2):
        x, out = memory[begin : begin + 3], memory[begin + 1 : begin + 4]
        assert whole_ways(lambda x=x, out=out: scaled(x, out=out)) == 1 - (begin > 1)
    assert whole_ways(lambda: scaled(memory[:3], out=memory[2:5])) == 1


def test_memory_that_is_gone():
    scaled(matrix())
    for _ in range(2):
        with pytest.raises(ValueError, match="it was freed"):
            scaled(freed(matrix()))


def test_gradients_are_refused_in_the_mode_of_each_call():
    """This holds also if such a tensor is known from a call without autograd."""
    for _ in range(3):
        with torch.no_grad():
            x = matrix().requires_grad_()
            assert torch.equal(scaled(x), expected(x)[0])
        with pytest.raises(NotImplementedError, match="x requires grad"):
            scaled(matrix().requires_grad_())
        scaled(matrix())
    with torch.no_grad():
        assert whole_ways(lambda: scaled(matrix().requires_grad_())) == 0


def test_tangents_are_refused():
    x = matrix()
    with torch.no_grad(), forward_ad.dual_level():
        scaled(x)
        with pytest.raises(NotImplementedError, match="x has a tangent"):
            scaled(forward_ad.make_dual(x, x))
    for _ in range(2):
        scaled(x)
    with pytest.raises(NotImplementedError, match="x has a tangent"):
        torch.func.jvp(scaled, (x,), (x,))


@pytest.mark.parametrize("mode", [Watch, WatchFunctions])
def test_a_mode_sees_every_call(mode):
    for before in (1, 0):
        for _ in range(2 * before):
            scaled(matrix())
        with mode() as watch:
            for _ in range(3):
                scaled(matrix())
        assert watch.seen == 3


def test_a_profiler_sees_every_call():
    for _ in range(2):
        scaled(matrix())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        scaled(matrix())
    assert SCALED.default.name() in {event.name for event in profiler.events()}


def test_what_is_no_plain_tensor():
    """A subclass, a lazy view, a transformation or a tracer gets its own result, whatever was known
    before."""
    x = matrix()
    step = torch.compile(scaled, backend="aot_eager", fullgraph=True)

    def plain():
        assert torch.equal(scaled(x), 2 * x)

    def subclass():
        assert type(scaled(x.as_subclass(Subclass))) is Subclass

    def negated():
        assert torch.equal(scaled(torch._neg_view(x)), -2 * x)

    def fake():
        with FakeTensorMode() as mode:
            assert isinstance(scaled(mode.from_tensor(x)), FakeTensor)
            with pytest.raises(AssertionError, match="FakeTensor"):
                scaled(x)

    def traced():
        graph = make_fx(lambda x: scaled(x), tracing_mode="symbolic")(x).graph
        assert SCALED.default in [node.target for node in graph.nodes]

    def traced_by_jit():
        graph = torch.jit.trace(lambda x: scaled(x), (x,), check_trace=False).graph
        assert SCALED.default.name().partition(".")[0] in str(graph)

    def compiled():
        assert torch.equal(step(x), 2 * x)

    def nested():
        with pytest.raises(TypeError, match="nested"):
            scaled(torch.nested.nested_tensor([x, x]))

    def mapped():
        assert whole_ways(lambda: torch.func.vmap(lambda row: scaled(x) + row)(x)) == 1

    cases = (plain, subclass, negated, fake, traced, traced_by_jit, compiled, nested, mapped)
    for before in cases:
        for case in (before, *cases):
            case()


def test_calls_of_inference_and_of_other_modes_of_autograd():
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad, torch.inference_mode):
        with mode():
            for ways in (1, 0, 0):
                x = matrix()
                found = []
                before = whole_ways(lambda x=x, found=found: found.append(scaled(x)))
                assert before <= ways
                assert torch.equal(found[0], 2 * x)
                assert not found[0].requires_grad
                assert found[0].is_inference() == torch.is_inference_mode_enabled()


@contextmanager
def filling():
    """Within the block torch fills the memory that it allocates."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_each_mode_of_filling_memory_is_known_by_itself():
    """Each operator has a separate tape for it."""
    scaled(matrix())
    with filling():
        assert [whole_ways(lambda: scaled(matrix())) for _ in range(2)] == [1, 0]
    assert len(SCALED.tapes.known) == 2


# ---- what a call teaches


def test_a_call_is_known_where_the_operator_was_given_what_the_function_was():
    """A call is not learnt if the function converted or left out a tensor, called the operator
    twice, or returned something else."""

    def converts(x):
        return SCALED({"x": x.clone()})[0]

    def leaves_out(x, other):
        return SCALED({"x": x})[0]

    def asks_twice(x):
        first, *_ = SCALED({"x": x})
        SCALED({"x": x})
        return first

    def returns_another(x):
        return SCALED({"x": x})[0] + 1

    def returns_a_view(x):
        return SCALED({"x": x})[0][:]

    def returns_one_in_a_tuple(x):
        return (SCALED({"x": x})[0],)

    def returns_a_list(x):
        return [*SCALED({"x": x})]

    def reverses(x, other):
        out, *others = SCALED({"x": other, "factors": x})
        return *others[::-1], out

    x, other = matrix(), matrix()
    for function, tensors, known in (
        (converts, [x], False),
        (leaves_out, [x, other], False),
        (asks_twice, [x], False),
        (returns_another, [x], False),
        (returns_a_view, [x], False),
        (returns_one_in_a_tuple, [x], False),
        (returns_a_list, [x], False),
        (reverses, [x, other], True),
    ):
        front = fronted()(function)
        for _ in range(3):
            found, direct = front(*tensors), function(*tensors)
            assert type(found) is type(direct), function
            pairs = zip(found, direct, strict=True)
            assert all(torch.equal(one, another) for one, another in pairs), function
        assert bool(front.calls.known) is known, function


def test_a_tensor_that_a_call_has_twice_may_come_once_to_the_operator():
    """An example is a pool of K and V. With two different tensors it is another call."""

    def first_of(x, again):
        CALLS.append({})
        return SCALED({"x": again})[0] if x is again else SCALED({"x": x, "factors": again})[0]

    front, ways = fronted()(first_of), []
    for same in (True, True, False, False, True):
        x, before = matrix(), len(CALLS)
        again = x if same else matrix()
        assert torch.equal(front(x, again), first_of(x, again))
        ways.append(len(CALLS) - before - 1)
    assert ways == [1, 0, 1, 0, 1]


def test_a_refusal_leaves_nothing():
    for _ in range(2):
        with pytest.raises(ValueError, match="factor -1"):
            scaled(matrix(), factor=-1.0)
    assert cache._listening.served is None
    assert not scaled.calls.known


def test_each_thread_learns_for_itself():
    scaled(matrix())
    ways = []
    thread = threading.Thread(target=lambda: ways.append(whole_ways(lambda: scaled(matrix()))))
    thread.start()
    thread.join()
    assert ways == [1]


def test_the_oldest_call_leaves(monkeypatch):
    monkeypatch.setattr(cache, "KEPT", 2)
    for rows in range(1, 6):
        scaled(matrix(rows, 8))
    assert len(scaled.calls.known) == len(SCALED.calls.known) == len(SCALED.tapes.known) == 2
    assert whole_ways(lambda: scaled(matrix(4, 8))) == 0
    assert whole_ways(lambda: scaled(matrix(1, 8))) == 1  # replaces 5, which was used earlier
    assert whole_ways(lambda: scaled(matrix(4, 8))) == 0


def test_no_tensor_is_kept():
    memory = np.zeros((3, 8), np.float32)
    alive = weakref.ref(memory)
    for _ in range(2):
        results = scaled(torch.from_numpy(memory), matrix(), all_of_it=True)
    known = [*scaled.calls.known.values(), *SCALED.calls.known.values()]
    assert len(held_by([*known, *results])) == len(results) == 3
    del memory
    CALLS.clear()
    gc.collect()
    assert alive() is None


# ---- wrong names


@fronted(HINTS)
def public(x, *, lengths=None, window=None):
    if x is None:
        raise TypeError("x is None")
    return x, lengths, window


def test_a_wrong_name_is_answered_with_the_right_one():
    assert public(1, lengths=2) == (1, 2, None)
    for name, answer in {
        "seq_lens": "no argument seq_lens; it is called lengths here",
        "windows": r"no argument windows; did you mean window\?",
        "sinks": "public has no argument sinks",
    }.items():
        with pytest.raises(TypeError, match=f"{answer}$"):
            public(1, **{name: 2})
    with pytest.raises(TypeError, match="x is None"):
        public(None, window=1)


def test_arguments_by_position_are_answered_with_their_names():
    with pytest.raises(TypeError, match="public has 3 arguments by position: it takes x, and all"):
        public(1, 2, 3)
