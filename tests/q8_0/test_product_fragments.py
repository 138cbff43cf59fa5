"""Lanes of an int8 mma's elements, and conversion of its sums to fp32: one warp, compared with a
product on the CPU. A wrong map gives garbage without an error.
"""

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Uint32

from kernelkit.call.launch import choose_target, launch
from kernelkit.compile.compiler import compile_once
from kernelkit.device.fake import fake_tensor
from q8_0.product.tile import OFFSET, multiply

ROWS, COLUMNS, DEPTH = 16, 8, 32


class OneProduct:
    """A kernel of one warp, with operands in words of four int8."""

    @cute.jit
    def __call__(
        self, mA: cute.Tensor, mB: cute.Tensor, mOut: cute.Tensor, stream: CUstream
    ) -> None:
        """A: (16, 8), B: (8, 8), by column: words; the result (16, 8)."""
        self.kernel(mA, mB, mOut).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, mA: cute.Tensor, mB: cute.Tensor, mOut: cute.Tensor) -> None:
        """Load fragments as the docstring of `multiply` describes."""
        lane = cute.arch.lane_idx()
        group, place = lane // 4, lane % 4
        a = (
            mA[group, place], mA[group + 8, place], mA[group, place + 4], mA[group + 8, place + 4]
        )  # fmt: skip
        found = multiply(a, (mB[group, place], mB[group, place + 4]))
        for index in cutlass.range_constexpr(4):
            mOut[group + index // 2 * 8, place * 2 + index % 2] = found[index]


def describe() -> tuple:
    """Return the function to compile, with example arguments."""
    words = [fake_tensor(Uint32, rows, 8) for rows in (ROWS, COLUMNS)]
    return OneProduct(), *words, fake_tensor(Float32, ROWS, COLUMNS), CUstream(0)


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"])
def test_the_map(arch):
    generator = torch.Generator().manual_seed(3)
    a, b = (
        torch.randint(-128, 128, (rows, DEPTH), dtype=torch.int8, generator=generator)
        for rows in (ROWS, COLUMNS)
    )
    a[0], b[0] = -128, -128  # the largest sum, 2^19
    b[1] = 127
    out = torch.full((ROWS, COLUMNS), torch.nan)
    words = [part.view(torch.int32).view(torch.uint32) for part in (a, b)]
    target = choose_target(out.device, "emulate", arch, (arch,))
    launch(compile_once(("fragments",), arch, describe), (*words, out), target, out.device)
    assert torch.equal(out - OFFSET, (a.double() @ b.double().T).float())
    assert (out - OFFSET)[0, 0] == 2.0**19
