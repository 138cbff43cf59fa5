"""End of a CTA: its columns of the rows of O, and their LSE (device code)."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32

from kernelkit.device import tmem
from kernelkit.device.warp_mma import pack
from mla.attention.sm90.finish import angles, factors_of, key_scale
from mla.attention.sm100.args import Lane, Scope, Sums
from mla.attention.sm100.plan import COLUMNS, Plan100

CHUNK = 32  # columns in registers at a time

__all__ = ["finish", "key_scale"]


@cute.jit
def finish(plan: Plan100, scope: Scope, lane: Lane, sums: Sums) -> None:
    """Finish the row of the thread."""
    store_row(plan, scope, lane, sums)


@cute.jit
def store_row(plan: Plan100, scope: Scope, lane: Lane, sums: Sums) -> None:
    """Store the CTA's columns of a row; the first CTA of the pair stores its LSE."""
    given, work = scope.given, scope.work
    factor = Float32(0.0)
    if lane.real:
        factor, lse = factors_of(plan, scope, lane.head, sums.top, sums.total)
        if work.half == 0:
            given.lse[work.entry, lane.token, lane.head] = lse
    values = cute.make_rmem_tensor(CHUNK, Float32)
    words = cute.make_rmem_tensor(CHUNK // 2, Uint32)
    for column in cutlass.range_constexpr(0, COLUMNS, CHUNK):
        read_chunk(scope, lane, column, values)
        for k in cutlass.range_constexpr(CHUNK):
            values[k] = values[k] * factor
        if cutlass.const_expr(plan.config.rope > 0 and column >= COLUMNS - plan.config.rope):
            if work.half == 1 and lane.real:
                rotate_back(plan, scope, values, column - (COLUMNS - plan.config.rope))
        for word in cutlass.range_constexpr(CHUNK // 2):
            words[word] = pack(values[2 * word], values[2 * word + 1], "bf16")
        if lane.real:
            row = given.o[work.entry, lane.token, lane.head, None].iterator
            start = cute.recast_ptr(row, dtype=Uint32) + (work.half * COLUMNS + column) // 2
            cute.autovec_copy(words, cute.make_tensor(start.align(16), cute.make_layout(CHUNK // 2)))


@cute.jit
def read_chunk(
    scope: Scope, lane: Lane, column: cutlass.Constexpr, values: cute.Tensor
) -> None:
    """Load columns of the row of O; zeros where no tile was added."""
    values.fill(0.0)
    if scope.work.count > 0:
        tile = tmem.tile_at(scope.buffers.tmem, column, CHUNK)
        tmem.load_row(tile, values, lane.row)
        tmem.wait_loads()


@cute.jit
def rotate_back(
    plan: Plan100, scope: Scope, values: cute.Tensor, first: cutlass.Constexpr
) -> None:
    """Rotate pairs of neighbours by minus the angle of the position. first: column of RoPE."""
    for pair in cutlass.range_constexpr(CHUNK // 2):
        cos, sin = angles(plan, scope, first // 2 + pair)
        x, y = values[2 * pair], values[2 * pair + 1]
        values[2 * pair] = x * cos + y * sin
        values[2 * pair + 1] = y * cos - x * sin
