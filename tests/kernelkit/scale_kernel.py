"""A kernel without tensor cores, y = factor * x, that compiles for any architecture.

It exercises `kernelkit.compile.compiler` and `kernelkit.call.launch` natively on a Hopper GPU and
in ptxemu.
"""

from typing import Any

import cutlass.cute as cute
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32
from cutlass.cute.runtime import make_fake_tensor

from kernelkit.call.launch import choose_target, launch
from kernelkit.call.tensors import require_tensors, require_tma
from kernelkit.compile.compiler import compile_once

ARCHS = ("sm_90a", "sm_100a")
THREADS = 128


@cute.kernel
def scale_kernel(x: cute.Tensor, y: cute.Tensor, factor: Float32) -> None:
    """Each CTA scales one row; threads stride over the columns."""
    row, _, _ = cute.arch.block_idx()
    thread, _, _ = cute.arch.thread_idx()
    columns = cute.size(x, mode=[1])
    for step in range((columns - thread + THREADS - 1) // THREADS):
        column = thread + step * THREADS
        y[row, column] = x[row, column] * factor


@cute.jit
def scale_host(x: cute.Tensor, y: cute.Tensor, factor: Float32, stream: CUstream) -> None:
    """Launch one CTA per row."""
    grid = (cute.size(x, mode=[0]), 1, 1)
    scale_kernel(x, y, factor).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)


def compile_scale(arch: str) -> Any:
    """The compiled host function for float32 [rows, columns], dynamic in both."""

    def describe() -> tuple:
        rows, columns = cute.sym_int32(), cute.sym_int32()
        matrix = [
            make_fake_tensor(Float32, (rows, columns), (cute.sym_int64(), 1)) for _ in range(2)
        ]
        return (scale_host, *matrix, Float32(1.0), CUstream(0))

    return compile_once("scale", arch, describe)


def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    """factor * x for float32 [rows, columns] with 16-byte rows, written like the kernels' APIs."""
    require_tensors(x=x)
    require_tma("x", x)
    target = choose_target(x.device, "auto", None, ARCHS)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    launch(compile_scale(target.arch), (x, y, factor), target, x.device)
    return y
