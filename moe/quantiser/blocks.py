"""Rows of a block of scale factors, rows of a thread, and zeros for missing rows (device code)."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from kernelkit.device.lanes import sum_below
from kernelkit.plan import hw
from moe.formats import SCALE_COLUMNS, SCALE_ROWS
from moe.quantiser.config import QUARTERS, VECTOR_BYTES

ROWS_OF_QUARTER = SCALE_ROWS // QUARTERS
NO_ROWS = -1
EXPERTS_AT_ONCE = 8  # experts whose offsets a lane loads in parallel
WORDS = VECTOR_BYTES // 4  # words of a store of zeros


@cute.jit
def row_of_thread(part: Int32, parts: cutlass.Constexpr[int], thread: Int32) -> tuple[Int32, Int32]:
    """Return (row within a block, its word in an atom) of a thread. Four neighbours share them.

    A warp has 8 rows whose words are neighbours.
    """
    lane, warp = thread % hw.WARP_THREADS, thread // hw.WARP_THREADS
    quarter = lane // SCALE_COLUMNS % QUARTERS
    inside = part * (ROWS_OF_QUARTER // parts) + warp * 2
    inside += lane // (SCALE_COLUMNS * QUARTERS)
    return quarter * ROWS_OF_QUARTER + inside, inside * QUARTERS + quarter


@cute.jit
def row_of_lane(part: Int32, whole: cutlass.Constexpr[int], thread: Int32) -> tuple[Int32, Int32]:
    """Return `row_of_thread` for a CTA that has `whole` rows, of neighbouring quarters."""
    groups = QUARTERS // whole
    quarter = part % groups * whole + thread % hw.WARP_THREADS // (hw.WARP_THREADS // whole)
    inside = part // groups
    return quarter * ROWS_OF_QUARTER + inside, inside * QUARTERS + quarter


@cute.jit
def clear_part(
    scales: cute.Tensor,
    atoms: Int32,
    block: Int32,
    part: Int32,
    parts: cutlass.Constexpr[int],
    cta: Int32,
    ctas: Int32,
    thread: Int32,
) -> None:
    """Write zeros to the scale factors of a part of a block; `ctas` CTAs share the atoms."""
    vectors = SCALE_ROWS // parts // WORDS  # of a part in an atom
    zeros = cute.make_rmem_tensor(WORDS, Int32)
    zeros.fill(0)
    at_once = SCALE_ROWS * SCALE_COLUMNS // parts // vectors  # atoms of a CTA
    first = cta * at_once + thread // vectors
    for atom in cutlass.range(first, atoms, ctas * at_once, unroll=1):
        vector = (Int64(block) * atoms + atom) * (SCALE_ROWS // WORDS) + part * vectors
        vector += thread % vectors
        cute.autovec_copy(zeros, cute.local_tile(scales, (WORDS,), (vector,)))


@cute.jit
def rows_of_block(
    offsets: cute.Tensor, block: Int32, thread: Int32, sRows: cute.Tensor
) -> tuple[Int32, Int32]:
    """Return (first row, end of its expert's rows) of a block; NO_ROWS past the last block.

    One warp finds them for all threads of the CTA. sRows: int32 [2], scratch.
    """
    if thread < hw.WARP_THREADS:
        first, last = find_rows(offsets, block)
        if thread == 0:
            sRows[0], sRows[1] = first, last
    cute.arch.sync_threads()
    return sRows[0], sRows[1]


@cute.jit
def find_rows(offsets: cute.Tensor, block: Int32) -> tuple[Int32, Int32]:
    """Compute `rows_of_block` in a warp: every lane has an equal share of consecutive experts."""
    lane, experts = cute.arch.lane_idx(), cute.size(offsets) - 1
    share = ceil_div(experts, hw.WARP_THREADS)
    begin = cutlass.min(lane * share, experts)
    end = cutlass.min(begin + share, experts)
    mine = Int32(0)
    for expert in cutlass.range(begin, end, EXPERTS_AT_ONCE, unroll=1):
        edges = edges_of(offsets, expert, end)
        for index in cutlass.range_constexpr(EXPERTS_AT_ONCE):
            mine += ceil_div(edges[index + 1] - edges[index], SCALE_ROWS)
    before = sum_below(mine, lane)
    first, last = Int32(NO_ROWS), Int32(NO_ROWS)
    if before <= block and block < before + mine:
        for expert in cutlass.range(begin, end, EXPERTS_AT_ONCE, unroll=1):
            edges = edges_of(offsets, expert, end)
            for index in cutlass.range_constexpr(EXPERTS_AT_ONCE):
                count = ceil_div(edges[index + 1] - edges[index], SCALE_ROWS)
                if before <= block and block < before + count:
                    first = edges[index] + (block - before) * SCALE_ROWS
                    last = edges[index + 1]
                before += count
    return cute.arch.warp_redux_sync(first, "max"), cute.arch.warp_redux_sync(last, "max")


@cute.jit
def edges_of(offsets: cute.Tensor, expert: Int32, end: Int32) -> cute.Tensor:
    """Load the offsets of some experts and the next one. Experts past `end` have no rows."""
    edges = cute.make_rmem_tensor(EXPERTS_AT_ONCE + 1, Int32)
    for index in cutlass.range_constexpr(EXPERTS_AT_ONCE + 1):
        edges[index] = offsets[cutlass.min(expert + index, end)]
    return edges


def ceil_div(number: Any, unit: int) -> Any:
    """Return `number` / `unit`, rounded up; not negative."""
    return (number + (unit - 1)) // unit
