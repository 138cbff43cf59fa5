"""Tapes: what is repeated at other addresses, which addresses fit, and which calls have no tape."""

from __future__ import annotations

import gc
from types import FunctionType, ModuleType, SimpleNamespace

import pytest
import torch

from kernelkit.call.launch import Target, launch
from kernelkit.call.tape import Tape, Taping, _maker, zeros_that_stay
from kernelkit.compile.compiler import collecting
from lab.tools.place import poisoned_outputs
from tests.kernelkit.scale_kernel import compile_scale

SHAPE = (3, 8)


def matrix(*shape: int) -> torch.Tensor:
    return torch.randn(shape or SHAPE)


def scaled(x: torch.Tensor, factor: float, y: torch.Tensor | None = None) -> torch.Tensor:
    """factor * x by a launch in the emulator."""
    y = x.new_empty(x.shape) if y is None else y
    launch(compile_scale("sm_90a"), (x, y, factor), Target("emulate", "sm_90a"), x.device)
    return y


def taped(call, *inputs: torch.Tensor, **options) -> tuple[tuple, Tape | None]:
    return Taping(inputs, **options).run(lambda: call(*inputs))


def check(call, *inputs: torch.Tensor, others=None) -> Tape:
    """Check that the tape of a call gives its results: for other inputs, too, and repeatedly."""
    results, tape = taped(call, *inputs)
    expected = [result.clone() for result in results]
    others = others or [matrix(*tensor.shape) for tensor in inputs]
    for given, wanted in ((others, call(*others)), (inputs, expected), (others, call(*others))):
        assert all(map(torch.equal, tape.repeat(given), wanted))
    return tape


def test_operations_between_launches_are_repeated():
    def call(x, row):
        first = scaled(x + row, 2.0).mul_(0.5)
        return scaled(first.flip(0), -1.0), first

    assert check(call, matrix(), matrix(8)).launches == 2


def test_a_broadcast_is_copied_each_time():
    check(lambda x: (scaled(x.expand(3, 8).contiguous(), 2.0),), matrix(8))


def test_scratch_is_new_each_time():
    tape = check(lambda x: (scaled(scaled(x, 2.0), 3.0),), matrix())
    first, second = (tape.repeat([matrix()])[0] for _ in "ab")
    assert first.data_ptr() != second.data_ptr()


def test_a_launch_is_given_parts_of_tensors():
    """Parts keep their distance from the tensor's beginning, for inputs and for new tensors."""

    def call(x):
        y = x.new_zeros(5, 8)
        scaled(x[1:], 3.0, y[2:4])
        return y, y[2:].view(torch.int32), y[1]

    check(call, matrix())


def test_results_may_be_inputs_and_of_any_size():
    def call(x, y):
        scaled(x, 2.0, y)
        return y, x.new_empty(0, 4), x[:0]

    _, tape = taped(call, matrix(), matrix())
    x, y = matrix(), matrix()
    result, *empty = tape.repeat([x, y])
    assert result is y
    assert torch.equal(y, 2.0 * x)
    assert [tuple(tensor.shape) for tensor in empty] == [(0, 4), (0, 8)]


def test_a_tape_that_gives_less_makes_what_it_gives_and_uses():
    def call(x):
        return scaled(x, 2.0), x + 1, scaled(x, 3.0), x.new_empty(0, 4), x.new_empty(3, 8)

    _, tape = taped(call, matrix())
    for numbers in ([2], [0, 1], [1, 0, 4], [3], []):
        less, x = tape.giving(numbers), matrix()
        assert len(less.makers) == 2 + len({3, 4} & {*numbers})
        found, every = less.repeat([x]), call(x)
        wanted = [every[number] for number in numbers]
        assert [result.shape for result in found] == [result.shape for result in wanted]
        computed = [n for n, number in enumerate(numbers) if number < 3]
        assert all(torch.equal(found[n], wanted[n]) for n in computed)
    assert [len(tape.makers), len(tape.repeat([x]))] == [4, 5]


# ---- which addresses fit


def odd(shape: tuple[int, ...], elements: int = 1) -> torch.Tensor:
    size = torch.Size(shape).numel()
    return torch.zeros(size + elements)[elements:].view(shape)


def double(x, *others):
    return (x * 2,)


@pytest.mark.parametrize(("first", "fitting"), [(0, {0, 4}), (1, {0, 1, 2, 4}), (2, {0, 2, 4})])
def test_an_address_is_aligned_as_the_first_one_was(first, fitting):
    """Alignment counts up to 16 bytes: the kernel may have been chosen by it."""
    _, tape = taped(double, odd(SHAPE, first))
    assert {n for n in (0, 1, 2, 4) if tape.repeat([odd(SHAPE, n)])} == fitting


def test_what_is_written_stays_as_far_from_the_others():
    """A result that overlapped an input keeps its distance; others only have to stay apart."""

    def into(x, y):
        return (scaled(x, 2.0, y),)

    line = torch.zeros(64)
    x, beside, across = line[:24].view(3, 8), line[24:48].view(3, 8), line[20:44].view(3, 8)
    _, tape = taped(into, x, beside, written=[1])
    assert tape.repeat([beside, x])
    assert tape.repeat([matrix(), matrix()])
    assert tape.repeat([x, across]) is tape.repeat([across, x]) is tape.repeat([x, x]) is None
    _, tape = taped(into, x, across, written=[1])
    assert tape.repeat([line[4:28].view(3, 8), beside])
    assert tape.repeat([x, beside]) is tape.repeat([across, x]) is None
    _, tape = taped(into, x, beside, written=[0, 1])
    assert tape.repeat([beside, x])
    assert tape.repeat([x, across]) is tape.repeat([x, x]) is None
    _, tape = taped(double, matrix(0, 8), matrix(0, 8), written=[1])
    assert tape.repeat([matrix(0, 8), matrix(0, 8)])


def test_parts_of_one_storage_are_told_apart():
    """Parts are identified by where they begin. One that begins elsewhere may belong to either, if
    the distance stays the same."""

    def begin(x, y):
        return scaled(x, 2.0), scaled(y, 3.0)

    def inside(x, y):
        return (scaled(y[1:], 2.0),)

    check(begin, *matrix(2, *SHAPE), others=[matrix(), matrix()])
    pair = matrix(2, *SHAPE)
    _, tape = taped(inside, *pair)
    assert tape.repeat([matrix(), matrix()]) is None
    assert tape.repeat([pair[1], pair[0]]) is None
    x, y = matrix(2, *SHAPE)
    assert torch.equal(tape.repeat([x, y])[0], 2.0 * y[1:])


# ---- what cannot be repeated, and what a tape keeps


def test_what_the_host_reads_is_seen():
    for call in (
        lambda x: (x * x.sum().item(),),
        lambda x: (x * 2 if (x > 0).all() else x * 3,),
        lambda x: (x[x.argmax() // 8] * 1,),  # an index
        lambda x: (x * len(x.to("meta")),),  # copies to another device, as tolist() on a GPU does
    ):
        _, tape = taped(call, matrix())
        assert tape.reads
    assert not taped(double, matrix())[1].reads


def test_tensors_from_elsewhere_cannot_be_repeated():
    """Their lifetime and identity would be unknown."""
    other = matrix()
    for call in (lambda x: (x + other,), lambda x: (scaled(x, 2.0, other),), lambda x: (other,)):
        _, tape = taped(call, matrix())
        assert tape is None


def test_kernels_that_are_not_there_cannot_be_repeated():
    with collecting():
        _, tape = taped(lambda x: (scaled(x, 2.0),), matrix())
    assert tape is None


def test_a_dry_run_launches_nothing():
    x, y = matrix(), torch.zeros(SHAPE)
    _, tape = taped(lambda x, y: (scaled(x, 2.0, y),), x, y, dry=True)
    assert not y.any()
    tape.repeat([x, y])
    assert torch.equal(y, 2.0 * x)


def test_a_tape_of_poisoned_outputs_poisons_them_again(monkeypatch):
    """A GPU is included, where allocation otherwise bypasses torch."""
    monkeypatch.setattr("kernelkit.call.tape._empty_strided_cuda", lambda *layout: "unfilled")
    like = SimpleNamespace(shape=(2,), stride=lambda: (1,), dtype=torch.float32)
    like.device = torch.device("cuda")
    assert _maker(like)() == "unfilled"
    with poisoned_outputs():
        maker = _maker(like)
        assert (maker.func, maker.keywords["device"]) == (torch.empty_strided, like.device)
        _, tape = taped(lambda x: (x.new_empty(4),), matrix())
        assert tape.repeat([matrix()])[0].isnan().all()


def test_zeros_that_stay():
    """Each repetition gets new ones, unless a plan holds them; also outside of a tape."""

    def call(x):
        zeros = zeros_that_stay(8, x)
        return (zeros, scaled(zeros.view(torch.float32)[None], 2.0))

    x = matrix()
    taping = Taping([x])
    (first, _), tape = taping.run(lambda: call(x))
    second, _ = tape.repeat([x])
    assert first.dtype == torch.int32
    assert not first.any()
    assert not second.any()
    assert first.data_ptr() != second.data_ptr()
    tape.hold(taping.memory(results=True))
    assert tape.repeat([x])[0] is tape.repeat([x])[0] is first
    assert torch.equal(call(x)[0], first)


def held_by(owner: object) -> list[torch.Tensor]:
    """Tensors reachable from an object, except through modules and classes."""
    seen, todo = {id(owner)}, [owner]
    for value in todo:
        for other in gc.get_referents(value):
            if id(other) not in seen and not isinstance(other, type | ModuleType | FunctionType):
                seen.add(id(other))
                todo.append(other)
    return [value for value in todo if isinstance(value, torch.Tensor)]
