"""A kernel that applies a function of device code to rows, one thread per row."""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_tensor

from kernelkit.call.launch import choose_target, launch
from kernelkit.compile.compiler import compile_once

COLUMNS = 64  # of a row: two mask words
THREADS = 32


class RowKernel:
    """`apply(scores, integers, numbers) -> tuple of Float32`; it may change scores in place.

    scores: fp32 registers, a row of them.
    integers: int32 (I,) of the row.
    numbers: fp32 (F,) of the row.
    """

    def __init__(self, apply: Callable) -> None:
        self.apply = apply

    @cute.jit
    def __call__(
        self,
        scores: cute.Tensor,
        integers: cute.Tensor,
        numbers: cute.Tensor,
        results: cute.Tensor,
        stream: CUstream,
    ) -> None:
        """Launch; all tensors are (rows, columns), rows a multiple of THREADS."""
        grid = (cute.size(scores, mode=[0]) // THREADS, 1, 1)
        self.kernel(scores, integers, numbers, results).launch(
            grid=grid, block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        scores: cute.Tensor,
        integers: cute.Tensor,
        numbers: cute.Tensor,
        results: cute.Tensor,
    ) -> None:
        """Each thread processes one row."""
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        row = block * THREADS + thread
        registers = cute.make_rmem_tensor(cute.size(scores, mode=[1]), Float32)
        cute.autovec_copy(scores[row, None], registers)
        returned = self.apply(registers, integers[row, None], numbers[row, None])
        cute.autovec_copy(registers, scores[row, None])
        for index in cutlass.range_constexpr(len(returned)):
            results[row, index] = returned[index]


def apply_to_rows(
    apply: Callable,
    scores: torch.Tensor,
    integers: torch.Tensor,
    numbers: torch.Tensor,
    arch: str = "sm_100a",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (scores afterwards, results of `apply` [rows, 4], NaN if it returned fewer).

    scores and numbers fp32, integers int32; any number of rows.
    """
    rows, columns = scores.shape
    padded = -(-rows // THREADS) * THREADS

    def pad(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat((tensor, tensor[:1].expand(padded - rows, -1))).contiguous()

    def describe() -> tuple[Any, ...]:
        def matrix(dtype: type[cutlass.Numeric], columns: int) -> Any:
            return make_fake_tensor(dtype, (cute.sym_int32(), columns), (columns, 1))

        tensors = (
            matrix(Float32, columns),
            matrix(Int32, integers.shape[1]),
            matrix(Float32, numbers.shape[1]),
            matrix(Float32, 4),
        )
        return (RowKernel(apply), *tensors, CUstream(0))

    arguments = [pad(tensor) for tensor in (scores, integers, numbers)]
    results = torch.full((padded, 4), torch.nan)
    config = (apply, columns, integers.shape[1], numbers.shape[1])
    compiled = compile_once(config, arch, describe)
    target = choose_target(scores.device, "emulate", arch, (arch,))
    launch(compiled, (*arguments, results), target, scores.device)
    return arguments[0][:rows], results[:rows]
