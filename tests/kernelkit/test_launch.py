"""kernelkit.launch: the same kernel in the emulator, and natively with `--hw` on a Hopper GPU."""

import ctypes
import gc
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from kernelkit import compile as kernel_compile
from kernelkit.launch import PreparedLaunch, Target, as_pointer, choose_target
from tests.kernelkit.scale_kernel import ARCHS, compile_scale, scale


def matrix(device: str, rows: int = 5, columns: int = 260) -> torch.Tensor:
    return torch.randn(rows, columns, device=device)


@pytest.fixture
def no_more_compiles(monkeypatch):
    """After this fixture any compilation fails the test."""

    def arm() -> None:
        def refuse(*_: object) -> None:
            raise AssertionError("compiled again")

        monkeypatch.setattr(kernel_compile, "_compile", refuse)

    return arm


def check_scale(device: str, no_more_compiles) -> None:
    x = matrix(device)
    torch.testing.assert_close(scale(x, 2.5), 2.5 * x, rtol=0, atol=0)
    no_more_compiles()
    wide = matrix(device, 3, 1024)[:, :640]  # other lengths and strides, the same compiled kernel
    torch.testing.assert_close(scale(wide, -1.0), -wide, rtol=0, atol=0)


def check_misaligned(device: str) -> None:
    shifted = torch.zeros(4 * 64 + 1, device=device)[1:].view(4, 64)
    with pytest.raises(ValueError, match="not a multiple of 16 bytes"):
        scale(shifted, 1.0)


def test_emulated(no_more_compiles):
    check_scale("cpu", no_more_compiles)


def test_emulated_misaligned():
    check_misaligned("cpu")


@pytest.mark.hw
def test_native(no_more_compiles):
    check_scale("cuda", no_more_compiles)


@pytest.mark.hw
def test_native_misaligned():
    check_misaligned("cuda")


@pytest.mark.hw
def test_native_follows_the_current_stream():
    """The launch is ordered after what its stream did before, and leaves other streams alone."""
    scale(matrix("cuda"), 1.0)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    x = torch.zeros(4096, 1024, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x.fill_(3.0)
        y = scale(x, 2.0)
        assert not side.query(), "the launch waited for its stream"
    side.synchronize()
    assert torch.equal(y, torch.full_like(y, 6.0))


@pytest.mark.hw
def test_native_is_captured_in_a_graph():
    """Captured on the capture's stream, replayed on new contents."""
    x = matrix("cuda")
    scale(x, 1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = scale(x, 4.0)
    x.fill_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, torch.full_like(y, 2.0))


def check_prepared(device: str) -> None:
    """Other tensors of the same sizes, by address alone."""
    target = choose_target(torch.device(device), "auto", None, ARCHS)
    x, y = matrix(device), matrix(device)
    prepared = PreparedLaunch(compile_scale(target.arch), (x, y, 2.5), target, x.device)
    for source in (matrix(device), x):
        result = torch.empty_like(y)
        prepared([source.data_ptr(), result.data_ptr()])
        assert torch.equal(result, 2.5 * source)
    with pytest.raises(ValueError, match="shorter"):
        prepared([x.data_ptr()])


def test_emulated_prepared():
    check_prepared("cpu")


class Recorded:
    """A compiled function whose native launches only say what their pointers lead to."""

    def __init__(self, compiled):
        self.execution_args, self.calls = compiled.execution_args, []

    def to(self, device):
        return self

    def generate_execution_args(self, *arguments):
        return self.execution_args.generate_execution_args(arguments, {})

    def run_compiled_program(self, pointers):
        assert all(type(pointer) is ctypes.c_void_p for pointer in pointers)
        kinds = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_float, ctypes.c_uint64)
        pairs = zip(kinds, pointers, strict=True)
        self.calls.append([kind.from_address(pointer.value).value for kind, pointer in pairs])


def test_what_a_prepared_native_launch_hands_over(monkeypatch):
    """Addresses and stream of each call, the number of the first."""
    streams = iter((1234, 77))
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=next(streams))
    )
    compiled, x, y = Recorded(compile_scale("sm_90a")), matrix("cpu"), matrix("cpu")
    target = Target("cuda", "sm_90a")
    prepared = PreparedLaunch(compiled, (x, y, 2.5), target, torch.device("cuda", 0))
    gc.collect()
    for addresses in ([x.data_ptr(), y.data_ptr()], [4096, 8192]):
        prepared(addresses)
    assert compiled.calls == [[x.data_ptr(), y.data_ptr(), 2.5, 1234], [4096, 8192, 2.5, 77]]


@pytest.mark.hw
def test_native_prepared():
    check_prepared("cuda")


@pytest.mark.hw
def test_native_prepared_follows_the_current_stream():
    target = choose_target(torch.device("cuda"), "auto", None, ARCHS)
    x, y, side = matrix("cuda"), matrix("cuda"), torch.cuda.Stream()
    prepared = PreparedLaunch(compile_scale(target.arch), (x, y, 2.0), target, x.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prepared([x.data_ptr(), y.data_ptr()])
    x.fill_(3.0)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        prepared([x.data_ptr(), y.data_ptr()])
        assert not side.query(), "the launch went to another stream"
    side.synchronize()
    assert torch.equal(y, torch.full_like(y, 6.0))
    x.fill_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, torch.ones_like(y))


@pytest.mark.parametrize(
    ("backend", "arch", "error", "words"),
    [
        ("gpu", None, ValueError, "backend 'gpu'"),
        ("cuda", None, ValueError, "needs CUDA tensors"),
        ("auto", "sm_80", NotImplementedError, "arch 'sm_80'"),
    ],
)
def test_refusals(backend, arch, error, words):
    with pytest.raises(error, match=words):
        choose_target(torch.device("cpu"), backend, arch, ARCHS)


def test_unknown_device():
    with pytest.raises(NotImplementedError, match="device meta"):
        choose_target(torch.device("meta"), "auto", None, ARCHS)


def test_the_dsl_gives_addresses_of_two_kinds():
    """An int or a c_void_p: both are what the executor takes without a conversion."""
    for given in (4096, ctypes.c_void_p(4096)):
        pointer = as_pointer(given)
        assert type(pointer) is ctypes.c_void_p
        assert pointer.value == 4096
