"""kernelkit.launch: the same kernel in the emulator, and natively with `--hw` on a Hopper GPU."""

import pytest
import torch

from kernelkit import compile as kernel_compile
from kernelkit.launch import choose_target
from tests.kernelkit.scale_kernel import ARCHS, scale


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


@pytest.mark.parametrize(
    ("backend", "arch", "error", "words"),
    [
        ("gpu", None, ValueError, "backend 'gpu'"),
        ("cuda", None, ValueError, "needs CUDA tensors"),
        ("auto", "sm_80", NotImplementedError, "arch 'sm_80'"),
        ("emulate", "sm_90a", NotImplementedError, "the emulator runs sm_100a"),
    ],
)
def test_refusals(backend, arch, error, words):
    with pytest.raises(error, match=words):
        choose_target(torch.device("cpu"), backend, arch, ARCHS)


def test_unknown_device():
    with pytest.raises(NotImplementedError, match="device meta"):
        choose_target(torch.device("meta"), "auto", None, ARCHS)
