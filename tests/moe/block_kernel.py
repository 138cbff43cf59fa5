"""A kernel that applies the functions of `moe.device.quantise` to blocks of fp32, one a thread."""

from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_tensor

from kernelkit.compile import compile_once
from kernelkit.launch import choose_target, launch
from kernelkit.narrow import packed_elements
from moe.device.quantise import quantise_block
from moe.formats import format_of

THREADS = 128


class BlockKernel:
    """words and code of every block; with `only_convert`, words of the elements times the scale."""

    def __init__(self, fmt: str, arch: str, *, only_convert: bool) -> None:
        self.form, self.arch, self.only_convert = format_of(fmt), arch, only_convert

    @cute.jit
    def __call__(
        self,
        inputs: tuple[cute.Tensor, ...],
        outputs: tuple[cute.Tensor, ...],
        stream: CUstream,
    ) -> None:
        """inputs: blocks [N, block], scales [N]; outputs: words [N, words], codes [N], int32."""
        grid = (cute.ceil_div(inputs[0].shape[0], THREADS), 1, 1)
        self.kernel(*inputs, *outputs).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(
        self, blocks: cute.Tensor, scales: cute.Tensor, words: cute.Tensor, codes: cute.Tensor
    ) -> None:
        """One thread, one block."""
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        row = block * THREADS + thread
        if row < blocks.shape[0]:
            values = cute.make_rmem_tensor(self.form.block, Float32)
            cute.autovec_copy(blocks[row, None], values)
            scale = scales[row]
            if cutlass.const_expr(self.only_convert):
                packed = packed_elements(values, scale, self.form.element, self.arch)
                codes[row] = Int32(0)
            else:
                g = scale if self.form.has_global else None
                packed, code = quantise_block(values, g, self.form, self.arch)
                codes[row] = Int32(code)
            cute.autovec_copy(packed, words[row, None])


def run_blocks(
    blocks: torch.Tensor, scales: torch.Tensor, fmt: str, arch: str, *, only_convert: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(bytes of the elements uint8 [N, bytes], codes uint8 [N]) of blocks fp32 [N, block]."""
    form, count = format_of(fmt), len(blocks)
    words = torch.empty(count, form.block // form.per_byte // 4, dtype=torch.int32)
    codes = torch.empty(count, dtype=torch.int32)

    def describe() -> tuple:
        rows = cute.sym_int32()
        sizes = ((Float32, form.block), (Int32, words.shape[1]))
        tables = [
            make_fake_tensor(dtype, (rows, size), (size, 1), assumed_align=16)
            for dtype, size in sizes
        ]
        lists = [make_fake_tensor(dtype, (rows,), (1,)) for dtype, _ in sizes]
        kernel = BlockKernel(fmt, arch, only_convert=only_convert)
        return kernel, (tables[0], lists[0]), (tables[1], lists[1]), CUstream(0)

    compiled: Any = compile_once(("blocks", fmt, only_convert), arch, describe)
    target = choose_target(torch.device("cpu"), "emulate", arch, (arch,))
    launch(compiled, ((blocks, scales), (words, codes)), target, blocks.device)
    return words.view(torch.uint8), codes.to(torch.uint8)
