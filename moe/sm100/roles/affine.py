"""What sums of products become before anything that is not linear: times the global scale, plus the
bias of their column (device code)."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from moe.config import GroupedConfig

BIAS_BYTES = 4
VECTOR = 4  # columns whose biases are loaded together; N is a multiple of it


@dataclass(frozen=True)
class Affine:
    """factor: of a row; up: of its columns of up, where that is another one. biases: address of
    those of neighbouring columns, left: how many there are to the last column, or fewer than one;
    None where there is no bias."""

    factor: Float32
    up: Float32 | None = None
    biases: Int64 | None = None
    left: Int32 | None = None

    def factor_of(self, config: GroupedConfig, column: int) -> Float32:
        """Of a column, counted from one with which gate begins."""
        if self.up is None or column // config.granularity % 2 == 0:
            return self.factor
        return self.up

    def moved(self, columns: Int32) -> "Affine":
        """So many columns on, whole pairs."""
        if self.biases is None:
            return self
        biases = self.biases + BIAS_BYTES * columns
        return Affine(self.factor, self.up, biases, self.left - columns)


@dataclass(frozen=True)
class OfColumn:
    """factor, bias: of a thread's column of the product, whose rows share the factor."""

    factor: Float32
    bias: Float32


@cute.jit
def affine_at(affine: Affine, bias: cute.Tensor, column: Int32) -> Affine:
    """With the biases from a packed column on: fp32 [N], of an expert."""
    first = Affine(affine.factor, affine.up, bias.iterator.toint(), cute.size(bias))
    return first.moved(column)


@cute.jit
def apply(
    config: cutlass.Constexpr[GroupedConfig],
    affine: Affine,
    values: cute.Tensor,
    first: cutlass.Constexpr[int],
) -> None:
    """values: fp32 of neighbouring columns, from the `first` one of `affine` on; in place."""
    if cutlass.const_expr(affine.biases is None and affine.up is None):
        values.store(values.load() * affine.factor)
    elif cutlass.const_expr(affine.biases is None):
        for index in cutlass.range_constexpr(cute.size(values)):
            values[index] = values[index] * affine.factor_of(config, first + index)
    else:
        for begin in cutlass.range_constexpr(0, cute.size(values), VECTOR):
            bias = bias_at(affine, first + begin)
            for index in cutlass.range_constexpr(0, VECTOR, 2):
                at = begin + index
                factor = affine.factor_of(config, first + at)
                factors = factor, factor
                values[at], values[at + 1] = cute.arch.fma_packed_f32x2(
                    (values[at], values[at + 1]), factors, (bias[index], bias[index + 1])
                )


@cute.jit
def bias_at(affine: Affine, first: cutlass.Constexpr[int]) -> tuple[Float32, ...]:
    """Of four neighbours, 0 behind the last column: sums are 0 there, and stay it.

    A predicate instead of a branch, so that many of these are in flight at a time. Not `.nc`: of
    read-only memory ptxas moves all loads of a tile to the front, and spills what they bring.
    """
    begin = " ".join(f"mov.f32 b{index}, 0f00000000;" for index in range(VECTOR))
    end = " ".join(f"mov.f32 {{$w{index}}}, b{index};" for index in range(VECTOR))
    return cute.arch.inline_ptx(
        f"{{ .reg .pred exists; .reg .f32 b<{VECTOR}>; {begin} "
        f"setp.gt.s32 exists, {{$r1}}, {first}; @exists ld.global.v4.f32 {{b0, b1, b2, b3}}, "
        f"[{{$r0}}+{BIAS_BYTES * first}]; {end} }}",
        write_only_types=[Float32] * VECTOR,
        read_only_args=[affine.biases, affine.left],
    )
