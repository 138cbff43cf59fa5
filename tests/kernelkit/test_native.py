"""One kernel without features of one architecture, launched where this machine can: in the emulator
always, and with --hw on the GPU: torch's current stream, one compile, refusals."""

from __future__ import annotations

import pytest
import torch

from kernelkit import compile as kernel_compile
from kernelkit.launch import ARCH_OF_MAJOR, choose_target, emulation, launch
from kernelkit.tensors import require_tma
from tests.kernelkit.scale_kernel import compile_scale

ARCHS = tuple(ARCH_OF_MAJOR.values())


def scaled(x: torch.Tensor, a: float) -> torch.Tensor:
    target = choose_target(x.device, "auto", None, ARCHS)
    y = torch.full_like(x, torch.nan)
    launch(compile_scale(target.arch), (x, y, a), target, x.device)
    return y


@pytest.mark.parametrize("length", [1, 128, 1000])
def test_emulated(length):
    x = torch.arange(length, dtype=torch.float32)
    with emulation() as active:
        y = scaled(x, 0.5)
    assert torch.equal(y, 0.5 * x)
    assert [report.launches[0].grid for report in active.reports] == [(-(-length // 128), 1, 1)]


@pytest.mark.hw
def test_native_launch_joins_the_current_stream():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # clocks; work behind it on this stream has to wait
        x = torch.ones(1 << 20, device="cuda")
        x.fill_(3.0)
        y = scaled(x, 2.0)
        unfinished = not stream.query()
    assert unfinished, "the launch ran on another stream or waited"
    stream.synchronize()
    assert (y == 6.0).all()


@pytest.mark.hw
def test_second_native_call_does_not_compile(monkeypatch):
    x = torch.ones(1000, device="cuda")
    scaled(x, 2.0)

    def refuse(*_arguments):
        raise AssertionError("compiled again")

    monkeypatch.setattr(kernel_compile, "_compile", refuse)
    assert (scaled(x[:77], 4.0) == 4.0).all()


@pytest.mark.hw
def test_misaligned_device_pointers_are_refused():
    memory = torch.zeros(1025, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(ValueError, match="not a multiple of 16"):
        require_tma("q", memory[1:].view(8, 128))
