"""What sums of products become before anything that is not linear: times the global scale, plus the
bias of their column (device code)."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

VECTOR = 4  # columns of bias that are loaded together; N is a multiple of it


@dataclass(frozen=True)
class Affine:
    """factor: of a row. bias: fp32 [N], of its expert, None where there is none."""

    factor: Float32
    bias: cute.Tensor | None


@cute.jit
def apply(affine: Affine, values: cute.Tensor, column: Int32) -> None:
    """values: fp32 of neighbouring packed columns from `column` on, a multiple of 4; in place."""
    if cutlass.const_expr(affine.bias is None):
        values.store(values.load() * affine.factor)
    else:
        factors = affine.factor, affine.factor
        for first in cutlass.range_constexpr(0, cute.size(values), VECTOR):
            bias = bias_at(affine.bias, column + first)
            for index in cutlass.range_constexpr(0, VECTOR, 2):
                at = first + index
                values[at], values[at + 1] = cute.arch.fma_packed_f32x2(
                    (values[at], values[at + 1]), factors, (bias[index], bias[index + 1])
                )


@cute.jit
def bias_at(bias: cute.Tensor, column: Int32) -> tuple[Float32, ...]:
    """Four neighbours, 0 behind the last column: those come from sums that are 0, and stay 0.

    A predicate instead of a branch, so that many of these are in flight at a time.
    """
    begin = " ".join(f"mov.f32 b{index}, 0f00000000;" for index in range(VECTOR))
    end = " ".join(f"mov.f32 {{$w{index}}}, b{index};" for index in range(VECTOR))
    return cute.arch.inline_ptx(
        f"{{ .reg .pred exists; .reg .f32 b<{VECTOR}>; {begin} "
        "setp.lt.s32 exists, {$r1}, {$r2}; "
        f"@exists ld.global.nc.v4.f32 {{b0, b1, b2, b3}}, [{{$r0}}]; {end} }}",
        write_only_types=[Float32] * VECTOR,
        read_only_args=[(bias.iterator + column).toint(), column, cute.size(bias)],
    )
