"""Statistics of columns, to which every thread contributes: a thread holds one key of a tile, a
column is a query row (device code).

A column's maximum over the keys of a warp uses redux. Its sum uses a transposing butterfly of
shuffles: each step halves the columns per lane. Then the four warps exchange through shared memory.
Lane l of every warp owns columns l N / 32 and, at N = 64, the next one. It combines the four parts
of a column in the same order in all warps, so every warp computes identical results in its private
`bases`.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from gqa_lowlatency.sm100.args import Buffers
from gqa_lowlatency.sm100.plan import BARRIERS, ROLES
from kernelkit.device import barriers
from kernelkit.device.online_softmax import finite
from kernelkit.device.shared_words import load, store
from kernelkit.plan import hw

WARPS = ROLES["epilogue"].warps
VECTOR = 4


def owned(columns: int) -> int:
    """Columns that a lane owns."""
    return max(1, columns // hw.WARP_THREADS)


@cute.jit
def own_column(columns: cutlass.Constexpr) -> Int32:
    """The first column of this lane; with few of them neighbouring lanes own the same."""
    return cute.arch.lane_idx() * columns // hw.WARP_THREADS


@cute.jit
def warp_maxima(scores: cute.Tensor) -> list:
    """The maximum of each column over the keys of this warp, in every lane."""
    return [
        cute.arch.warp_redux_sync(scores[column], "fmax", nan=True)
        for column in range(cute.size(scores))
    ]


@cute.jit
def warp_sums(sums: cute.Tensor) -> list:
    """Sums over the lanes of a warp of this lane's columns."""
    lane = cute.arch.lane_idx()
    values = [sums[column] for column in range(cute.size(sums))]
    for distance in cutlass.range_constexpr(5):
        offset = hw.WARP_THREADS // 2 >> distance
        if cutlass.const_expr(len(values) > 1):
            half = len(values) // 2
            upper = (lane & offset) != 0
            kept = [values[half + k] if upper else values[k] for k in range(half)]
            given = [values[k] if upper else values[half + k] for k in range(half)]
            values = [
                kept[k] + cute.arch.shuffle_sync_bfly(given[k], offset=offset) for k in range(half)
            ]
        else:
            values = [values[0] + cute.arch.shuffle_sync_bfly(values[0], offset=offset)]
    return values


@cute.jit
def meet(buffers: Buffers, columns: cutlass.Constexpr, parity: Int32) -> Int32:
    """All warps have left their parts of `parity`; returns where this lane's columns begin there.

    What was left with the other parity has been read by then.
    """
    barriers.meet(BARRIERS, "columns")
    return part_of(buffers, columns, parity, Int32(0)) + own_column(columns) * 4


@cute.jit
def part_of(buffers: Buffers, columns: cutlass.Constexpr, parity: Int32, warp: Int32) -> Int32:
    """Address of what a warp leaves."""
    return buffers.parts + (parity * WARPS + warp) * columns * 4


@cute.jit
def update_row_max(
    buffers: Buffers, scores: cute.Tensor, row_max: cute.Tensor, parity: Int32
) -> cutlass.Boolean:
    """row_max, of this lane's columns, takes in a tile of scores; whether any has moved.

    parity: of the tile.

    Then `bases` holds for each column what to subtract from its scores, and what older sums and O
    are to be multiplied by.
    """
    columns = cute.size(scores)
    warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
    maxima = warp_maxima(scores)
    mine = part_of(buffers, columns, parity, warp)
    if lane == 0:
        for first in cutlass.range_constexpr(0, columns, VECTOR):
            store(mine + first * 4, Float32, tuple(maxima[first : first + VECTOR]))
    begin = meet(buffers, columns, parity)
    mine = buffers.bases + warp * 2 * columns * 4
    least_scale = Float32(1.0)
    for k in cutlass.range_constexpr(owned(columns)):
        top = row_max[k]
        for other in cutlass.range_constexpr(WARPS):
            top = cute.arch.fmax(top, load(begin + (other * columns + k) * 4, Float32))
        base = finite(top)
        acc_scale = cute.math.exp2(row_max[k] - base, fastmath=True)
        least_scale = cutlass.min(least_scale, acc_scale)
        row_max[k] = top
        if is_speaker(columns):
            place = mine + (own_column(columns) + k) * 4
            store(place, Float32, (base,))
            store(place + columns * 4, Float32, (acc_scale,))
    cute.arch.sync_warp()
    return cute.arch.vote_any_sync(least_scale < 1.0)


@cute.jit
def total_sums(buffers: Buffers, sums: cute.Tensor, parity: Int32) -> list:
    """Sums over all threads of this lane's columns."""
    columns = cute.size(sums)
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    values = warp_sums(sums)
    mine = part_of(buffers, columns, parity, warp) + own_column(columns) * 4
    if is_speaker(columns):
        for k in cutlass.range_constexpr(owned(columns)):
            store(mine + k * 4, Float32, (values[k],))
    begin = meet(buffers, columns, parity)
    totals = []
    for k in cutlass.range_constexpr(owned(columns)):
        total = load(begin + k * 4, Float32)
        for other in cutlass.range_constexpr(1, WARPS):
            total += load(begin + (other * columns + k) * 4, Float32)
        totals.append(total)
    return totals


@cute.jit
def is_speaker(columns: cutlass.Constexpr) -> cutlass.Boolean:
    """Whether this lane is the first of those that own its columns."""
    return cute.arch.lane_idx() % cutlass.max(hw.WARP_THREADS // columns, 1) == 0


@cute.jit
def bases(
    buffers: Buffers, columns: cutlass.Constexpr, first: cutlass.Constexpr, count: cutlass.Constexpr
) -> list:
    """Return the bases of columns first .. first + count from `update_row_max`, subtracted from
    scores.
    """
    return _shared(buffers, columns, first, count)


@cute.jit
def acc_scales(
    buffers: Buffers, columns: cutlass.Constexpr, first: cutlass.Constexpr, count: cutlass.Constexpr
) -> list:
    """Return the factors of older sums and O of these columns from `update_row_max`."""
    return _shared(buffers, columns, columns + first, count)


@cute.jit
def _shared(
    buffers: Buffers, columns: cutlass.Constexpr, first: cutlass.Constexpr, count: cutlass.Constexpr
) -> list:
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    begin = buffers.bases + (warp * 2 * columns + first) * 4
    values = []
    for place in cutlass.range_constexpr(0, count, VECTOR):
        values.extend(load(begin + place * 4, Float32, VECTOR))
    return values
