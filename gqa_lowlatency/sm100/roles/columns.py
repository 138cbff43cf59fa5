"""Statistics of columns, to which every thread has something: a thread holds one key of a tile, a
column is a query row (device code).

A column's maximum over the keys of a warp comes by redux, its sum by shuffles that halve what a
lane is concerned with; the four warps then meet in shared memory. Lane l of every warp owns
columns l N / 32 and, at N = 64, the next: it alone combines the four parts of a column, in the same
order in all warps, so that each warp has the results for itself, in `bases`.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from gqa_lowlatency.device.shared_words import load_vector, load_word, store_vector, store_word
from gqa_lowlatency.sm100.args import Buffers
from gqa_lowlatency.sm100.plan import COLUMNS_BARRIER, ROLES
from kernelkit import hw
from kernelkit.online_softmax import finite

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
    cute.arch.barrier(barrier_id=COLUMNS_BARRIER, number_of_threads=ROLES["epilogue"].threads)
    return part_of(buffers, columns, parity, Int32(0)) + own_column(columns) * 4


@cute.jit
def part_of(buffers: Buffers, columns: cutlass.Constexpr, parity: Int32, warp: Int32) -> Int32:
    """Address of what a warp leaves."""
    return buffers.parts + (parity * WARPS + warp) * columns * 4


@cute.jit
def move_tops(
    buffers: Buffers, scores: cute.Tensor, tops: cute.Tensor, more: tuple
) -> cutlass.Boolean:
    """tops, of this lane's columns, take in a tile of scores; whether any has moved.

    more: (parity of the tile, log2 by which weights are to be larger than of their maximum).

    Then `bases` holds for each column what to subtract from its scores, and by what older sums and
    O shrink.
    """
    (parity, bias_log2), columns = more, cute.size(scores)
    warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
    maxima = warp_maxima(scores)
    mine = part_of(buffers, columns, parity, warp)
    if lane == 0:
        for first in cutlass.range_constexpr(0, columns, VECTOR):
            store_vector(mine + first * 4, tuple(maxima[first : first + VECTOR]))
    begin = meet(buffers, columns, parity)
    mine = buffers.bases + warp * 2 * columns * 4
    shrunk = Float32(1.0)
    for k in cutlass.range_constexpr(owned(columns)):
        top = tops[k]
        for other in cutlass.range_constexpr(WARPS):
            top = cutlass.max(top, load_word(begin + (other * columns + k) * 4))
        base = finite(top)
        shrink = cute.math.exp2(tops[k] - base, fastmath=True)
        shrunk = cutlass.min(shrunk, shrink)
        tops[k] = top
        if is_speaker(columns):
            place = mine + (own_column(columns) + k) * 4
            store_word(place, base - bias_log2)
            store_word(place + columns * 4, shrink)
    cute.arch.sync_warp()
    return cute.arch.vote_any_sync(shrunk < 1.0)


@cute.jit
def total_sums(buffers: Buffers, sums: cute.Tensor, parity: Int32) -> list:
    """Sums over all threads of this lane's columns."""
    columns = cute.size(sums)
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    values = warp_sums(sums)
    mine = part_of(buffers, columns, parity, warp) + own_column(columns) * 4
    if is_speaker(columns):
        for k in cutlass.range_constexpr(owned(columns)):
            store_word(mine + k * 4, values[k])
    begin = meet(buffers, columns, parity)
    totals = []
    for k in cutlass.range_constexpr(owned(columns)):
        total = load_word(begin + k * 4)
        for other in cutlass.range_constexpr(1, WARPS):
            total += load_word(begin + (other * columns + k) * 4)
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
    """What `move_tops` left to subtract from the scores of columns first .. first + count."""
    return _shared(buffers, columns, first, count)


@cute.jit
def shrinks(
    buffers: Buffers, columns: cutlass.Constexpr, first: cutlass.Constexpr, count: cutlass.Constexpr
) -> list:
    """What `move_tops` left to multiply older sums and O of those columns by."""
    return _shared(buffers, columns, columns + first, count)


@cute.jit
def _shared(
    buffers: Buffers, columns: cutlass.Constexpr, first: cutlass.Constexpr, count: cutlass.Constexpr
) -> list:
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    begin = buffers.bases + (warp * 2 * columns + first) * 4
    values = []
    for place in cutlass.range_constexpr(0, count, VECTOR):
        values.extend(load_vector(begin + place * 4))
    return values
