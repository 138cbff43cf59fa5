"""A thread and its query row: which one it has, the numbers that roles publish about it, and its
lines of shared memory (device code).

One thread holds a row, in a CTA pair the two halves of it lie with threads r and rows + r. The
softmax thread of a row publishes for the correction thread of that row.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.pipeline import PipelineState

from fmha.shared.args import Buffers, Pipes, Row, Scalars, Work
from fmha.shared.walk import row_of
from fmha.sm100.layout import STATISTICS
from fmha.sm100.plan import Plan
from kernelkit.device import tmem
from kernelkit.device.barriers import meet
from kernelkit.device.boxes import Box, turn
from kernelkit.plan import hw


@dataclass(frozen=True)
class OwnRow(Row):
    """What a softmax or correction thread owns: a query row, or half of one in a CTA pair."""

    lane: Int32  # of TMEM; the thread among the 128 of its query tile
    row: Int32  # in this CTA's part of the tile
    half: Int32  # 0; in a pair 1 for the second half of the columns
    q_tile: Int32  # which of the CTA's query tiles the row is in


@dataclass(frozen=True)
class Lane:
    """What a thread that owns a row works with, the same for all tiles."""

    row: OwnRow
    scores: cute.Tensor | None  # fp32 registers: S, then its weights; correction has none
    scalars: Scalars
    buffers: Buffers
    pipes: Pipes
    negative: Boolean | None = None  # whether scores are negated: their factor is below 0


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
    """Registers `values` (N,) to columns first .. first + N of this thread's part of its row.

    part_columns: of a thread's part, all of the row or in a CTA pair half of a piece;
    tile_columns: of the query tile.
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
    """Registers `values` (N,) to columns first .. first + N of a row of panel `index` of the
    buffer. rows: of a panel.

    They go 16 bytes at a time; eight rows at one column lie in different banks. The swizzle is
    spelled out because a copy through `Box.at` becomes single elements.
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
def own_row(plan: Plan, work: Work, scalars: Scalars, q_tile: Int32) -> OwnRow:
    """This thread's row of query tile `q_tile`, and which keys it sees."""
    rows = plan.layout.rows
    thread, _, _ = cute.arch.thread_idx()
    lane = thread % hw.TMEM_LANES
    row, half = lane % rows, lane // rows
    of = row_of(plan, work, scalars, q_tile, row)
    return OwnRow(of.token, of.head, of.begin, of.end, of.sink_end, lane, row, half, q_tile)


@cute.jit
def o_column(plan: Plan, lane: Lane) -> Int32:
    """TMEM column where O of the lane's query tile begins."""
    return plan.tmem["O0"].begin + lane.row.q_tile * plan.tmem["O0"].columns


def told_in_log2(plan: Plan) -> bool:
    """Whether a row's maximum is told in log2 units: where its scores have a scale of their own,
    beyond that of the launch. With a softcap that scale comes before the scores."""
    return plan.config.is_fp8 and not plan.config.softcap


@cute.jit
def publish(lane: Lane, values: tuple[Float32, ...]) -> None:
    """Tell the correction one or two numbers about this row, whose slots are free."""
    for number in cutlass.range_constexpr(len(values)):
        slot(lane, number)[0] = values[number]
    lane.pipes.row.signal(lane.row.q_tile)


@cute.jit
def read_published(
    lane: Lane, state: PipelineState, count: cutlass.Constexpr
) -> tuple[Float32, ...]:
    """The numbers that the softmax warps told about this row."""
    lane.pipes.row.wait(state, lane.row.q_tile)
    values = tuple(slot(lane, number)[0] for number in range(count))
    lane.pipes.row.release(lane.row.q_tile)
    return values


@cute.jit
def slot(lane: Lane, number: cutlass.Constexpr) -> cute.Tensor:
    """A number of this row, (1,) in the statistics buffer."""
    place = (STATISTICS * lane.row.q_tile + number) * hw.TMEM_LANES + lane.row.lane
    return cute.make_tensor(lane.buffers.statistics + place, cute.make_layout(1))


@cute.jit
def from_other_half(plan: Plan, lane: Lane, value: Float32, turn: Int32) -> Float32:
    """What the thread with the other half of the row passes as `value`.

    turn: of the slots; 0 and 1 alternate from tile to tile, 2 is for the end of the block. A slot
    is then rewritten only behind the barrier of a call between, which its reader has passed.
    """
    first = (STATISTICS * plan.layout.q_tiles + turn) * hw.TMEM_LANES
    slots = cute.make_tensor(lane.buffers.statistics + first, cute.make_layout(hw.TMEM_LANES))
    slots[lane.row.lane] = value
    # The halves of a row lie with warps w and w + 2: the other two need not be waited for.
    meet(plan.barriers, "halves", lane.row.row // hw.WARP_THREADS)
    return slots[lane.row.lane ^ plan.layout.rows]
