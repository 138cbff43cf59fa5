"""Query row of a thread, the numbers that roles publish about it, and its lines of shared memory
(device code).

One thread holds a row; in a CTA pair threads r and rows + r hold its two halves. The softmax thread
of a row publishes for the correction thread of that row.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.pipeline import PipelineState

from fmha.shared.args import Buffers, Pipes, Row, Scalars, Scope, Tables, Work
from fmha.shared.walk import row_of
from fmha.sm100.layout import STATISTICS
from fmha.sm100.plan import Plan
from kernelkit.device import tmem
from kernelkit.device.barriers import meet
from kernelkit.device.boxes import Box, turn
from kernelkit.plan import hw


@dataclass(frozen=True)
class OwnRow(Row):
    """Query row of a softmax or correction thread, or half of a row in a CTA pair."""

    lane: Int32  # of TMEM; the thread among the 128 of its query tile
    row: Int32  # in this CTA's part of the tile
    half: Int32  # 0; in a pair 1 for the second half of the columns
    q_tile: Int32  # which of the CTA's query tiles the row is in


@dataclass(frozen=True)
class Lane:
    """Context of a thread and its row, unchanged over the tiles of a block."""

    row: OwnRow
    scores: cute.Tensor | None  # fp32 registers: S, then its weights; correction has none
    scalars: Scalars
    buffers: Buffers
    pipes: Pipes
    negative: Boolean | None = None  # whether scores are negated: their factor is below 0
    tables: Tables | None = None  # of functions of positions; None without one


@cute.jit
def store_part(
    box: Box,
    buffer: cute.Pointer,
    row: OwnRow,
    values: cute.Tensor,
    first: cutlass.Constexpr,
    part_columns: cutlass.Constexpr,
    tile_columns: cutlass.Constexpr,
) -> None:
    """Store registers `values` (N,) to columns first .. first + N of this thread's part of its row.

    Args:
        part_columns: columns of a thread's part: the row, or in a CTA pair half of a piece.
        tile_columns: columns of the query tile.
    """
    box_index = first // box.columns + row.half * (part_columns // box.columns)
    box_index += row.q_tile * (tile_columns // box.columns)
    store_line(box.rows, box, buffer, box_index, row.row, first % box.columns, values)


@cute.jit
def store_line(
    rows: cutlass.Constexpr,
    box: Box,
    buffer: cute.Pointer,
    index: Int32,
    row: Int32,
    first: Int32,
    values: cute.Tensor,
) -> None:
    """Store registers `values` (N,) to columns first .. first + N of a row of panel `index`.

    rows: rows of a panel. The stores are 16 bytes each; eight rows at one column lie in different
    banks. The swizzle is explicit because a copy through `Box.at` becomes single elements.
    """
    unit = hw.SMEM_UNIT_BYTES * 8 // values.element_type.width
    units = box.columns // unit
    line = buffer + (index * rows + row) * box.columns
    moved = turn(row, units * hw.SMEM_UNIT_BYTES)
    layout = cute.make_layout(unit)
    for part in cutlass.range_constexpr(cute.size(values) // unit):
        target = line + ((first // unit + part) ^ moved) * unit
        cute.autovec_copy(
            tmem.columns_of(values, part * unit, unit),
            cute.make_tensor(target.align(hw.SMEM_UNIT_BYTES), layout),
        )


@cute.jit
def own_row(plan: Plan, work: Work, scope: Scope, q_tile: Int32) -> OwnRow:
    """Return this thread's row of query tile `q_tile`, with the keys that it sees."""
    rows = plan.layout.rows
    thread, _, _ = cute.arch.thread_idx()
    lane = thread % hw.TMEM_LANES
    row, half = lane % rows, lane // rows
    of = row_of(plan, work, scope.tensors, scope.scalars, q_tile, row)
    return OwnRow(
        *(of.token, of.head, of.begin, of.end, of.sink_end, of.branch, of.spot),
        *(lane, row, half, q_tile),
    )


@cute.jit
def o_column(plan: Plan, lane: Lane) -> Int32:
    """Return the TMEM column where O of the lane's query tile begins."""
    return plan.tmem["O0"].begin + lane.row.q_tile * plan.tmem["O0"].columns


def told_in_log2(plan: Plan) -> bool:
    """Return whether a row's maximum is published in log2 units.

    True if the scores have scale factors beyond that of the launch. With a softcap or a score_mod
    those are applied to q.k before.
    """
    return plan.config.is_fp8 and not plan.config.scales_first


@cute.jit
def publish(lane: Lane, values: tuple[Float32, ...]) -> None:
    """Publish one or two numbers about this row to the correction; their slots are free."""
    for number in cutlass.range_constexpr(len(values)):
        slot(lane, number)[0] = values[number]
    lane.pipes.row.signal(lane.row.q_tile)


@cute.jit
def read_published(
    lane: Lane, state: PipelineState, count: cutlass.Constexpr
) -> tuple[Float32, ...]:
    """Wait for and return the numbers that the softmax warps published about this row."""
    lane.pipes.row.wait(state, lane.row.q_tile)
    values = tuple(slot(lane, number)[0] for number in range(count))
    lane.pipes.row.release(lane.row.q_tile)
    return values


@cute.jit
def slot(lane: Lane, number: cutlass.Constexpr) -> cute.Tensor:
    """Return the slot of a number of this row, (1,) in the statistics buffer."""
    place = (STATISTICS * lane.row.q_tile + number) * hw.TMEM_LANES + lane.row.lane
    return cute.make_tensor(lane.buffers.statistics + place, cute.make_layout(1))


@cute.jit
def from_other_half(plan: Plan, lane: Lane, value: Float32, turn: Int32) -> Float32:
    """Exchange `value` with the thread that has the other half of the row; return its value.

    turn: index of the slots. 0 and 1 alternate from tile to tile, 2 is for the end of the block. A
    slot is then rewritten only after the barrier of a call in between, which its reader has passed.
    """
    first = (STATISTICS * plan.layout.q_tiles + turn) * hw.TMEM_LANES
    slots = cute.make_tensor(lane.buffers.statistics + first, cute.make_layout(hw.TMEM_LANES))
    slots[lane.row.lane] = value
    # Warps w and w + 2 have the halves of a row: no wait for the other two warps.
    meet(plan.barriers, "halves", lane.row.row // hw.WARP_THREADS)
    return slots[lane.row.lane ^ plan.layout.rows]
