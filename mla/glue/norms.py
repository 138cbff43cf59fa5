"""Norms of rows that the lanes of a warp hold (device code). `mla.glue.reference` defines the bits.

Every product and sum is rounded by itself: `.rn` keeps ptxas from fusing them. So the result can be
told from the operations alone, and a definition in torch has the same bits.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernelkit.device.words import float_of
from kernelkit.plan.hw import WARP_THREADS
from kvcache.movement.config import PIECE, VECTOR_BYTES
from kvcache.movement.device import load_bytes, zeros
from kvcache.movement.entry import widened
from mla.glue.config import NormWords

ADD_SQUARE = "{ .reg .f32 s; mul.rn.f32 s, {$r1}, {$r1}; add.rn.f32 {$w0}, {$r0}, s; }"
FACTOR = (
    "{ .reg .f32 m; mul.rn.f32 m, {$r0}, {$r1}; add.rn.f32 m, m, {$r2}; sqrt.rn.f32 m, m; "
    "rcp.rn.f32 {$w0}, m; }"
)
SHIFTED = (
    "{ .reg .f32 a; mul.rn.f32 a, {$r0}, {$r1}; mul.rn.f32 a, a, {$r2}; "
    "add.rn.f32 {$w0}, a, {$r3}; }"
)


@cute.jit
def load_row(
    address: Int64,
    pieces: cutlass.Constexpr[int],
    last_lanes: cutlass.Constexpr[int],
    lane: Int32,
) -> list[cute.Tensor]:
    """Load the pieces of a lane of a row in bf16, two elements to a word; zeros behind the row."""
    found = []
    for piece in cutlass.range_constexpr(pieces):
        words = zeros(PIECE // 2)
        if piece < pieces - 1 or lane < last_lanes:
            load_bytes(address + (piece * WARP_THREADS + lane) * VECTOR_BYTES, words)
        found.append(words)
    return found


@cute.jit
def load_weight(address: Int64, dtype: cutlass.Constexpr[str], piece: Int32) -> cute.Tensor:
    """Load PIECE elements of a vector in 'bf16' or 'fp32', as fp32. piece: of the whole vector."""
    if cutlass.const_expr(dtype == "bf16"):
        words = zeros(PIECE // 2)
        load_bytes(address + piece * VECTOR_BYTES, words)
        return widened(words)
    values, half = cute.make_rmem_tensor(PIECE, Float32), PIECE // 2
    for part in cutlass.range_constexpr(2):
        place = address + (2 * piece + part) * VECTOR_BYTES
        load_bytes(place, cute.local_tile(values, (half,), (part,)))
    return values


@cute.jit
def sum_over(value: Float32, lanes: cutlass.Constexpr[int]) -> Float32:
    """Sum over `lanes` neighbouring lanes, a power of two, nearest ones first; all get it."""
    for step in (1, 2, 4, 8, 16):
        if cutlass.const_expr(step < lanes):
            value = value + cute.arch.shuffle_sync_bfly(value, step)
    return value


@cute.jit
def add_squares(total: Float32, values: cute.Tensor) -> Float32:
    """Add the squares of a fragment, one by one."""
    for index in cutlass.range_constexpr(cute.size(values)):
        total = cute.arch.inline_ptx(
            ADD_SQUARE, write_only_types=[Float32], read_only_args=[total, values[index]]
        )
    return total


@cute.jit
def factor_of(squares: Float32, width: cutlass.Constexpr[int], eps_bits: Int64) -> Float32:
    """1 / sqrt(squares / width + eps), every step rounded."""
    eps = float_of(cutlass.Uint32(eps_bits))
    return cute.arch.inline_ptx(
        FACTOR, write_only_types=[Float32], read_only_args=[squares, Float32(1.0 / width), eps]
    )


@cute.jit
def scale(
    values: cute.Tensor,
    factor: Float32,
    norm: NormWords,
    dtype: cutlass.Constexpr[str],
    piece: Int32,
) -> None:
    """Multiply a piece by the factor of its row, then by the weight, in place."""
    weight = load_weight(norm.weight, dtype, piece)
    for index in cutlass.range_constexpr(PIECE):
        values[index] = values[index] * factor * weight[index]


@cute.jit
def centre(
    values: cute.Tensor, width: cutlass.Constexpr[int], lanes: cutlass.Constexpr[int]
) -> None:
    """Subtract the mean of a row, of which each of `lanes` lanes has a fragment, in place."""
    total = Float32(0.0)
    for index in cutlass.range_constexpr(cute.size(values)):
        total = total + values[index]
    mean = sum_over(total, lanes) * Float32(1.0 / width)
    for index in cutlass.range_constexpr(cute.size(values)):
        values[index] = cute.arch.inline_ptx(
            "sub.rn.f32 {$w0}, {$r0}, {$r1};",
            write_only_types=[Float32],
            read_only_args=[values[index], mean],
        )


@cute.jit
def scale_and_shift(
    values: cute.Tensor, factor: Float32, weight: cute.Tensor, bias: cute.Tensor
) -> None:
    """values * factor * weight + bias, in place."""
    for index in cutlass.range_constexpr(cute.size(values)):
        values[index] = cute.arch.inline_ptx(
            SHIFTED,
            write_only_types=[Float32],
            read_only_args=[values[index], factor, weight[index], bias[index]],
        )
