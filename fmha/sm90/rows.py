"""Which rows and columns of a query tile a thread has (device code): two rows, every fourth pair of
their columns."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fmha.device.args import Scalars, Work
from fmha.device.walk import first_head, first_token, own_tile, row_begin, row_end
from fmha.sm90.plan import Plan90
from kernelkit import hw


@dataclass(frozen=True)
class Row:
    """A query row."""

    token: Int32  # query of the entry; rows at and beyond q_length exist only on chip
    head: Int32  # query head
    begin: Int32  # the row sees keys [begin, end), and those of [0, sink_end) below end
    end: Int32
    sink_end: Int32


@dataclass(frozen=True)
class Lane:
    """A thread's place in its query tile."""

    team: Int32  # which of the CTA's query tiles
    warp: Int32  # of the warpgroup
    column: Int32  # its first one; the next is its neighbour, and so on every 8
    rows: tuple[Row, Row]


@cute.jit
def own_lane(plan: Plan90, work: Work, scalars: Scalars, team: Int32) -> Lane:
    """This thread's place in query tile `team` of the block."""
    lane = cute.arch.lane_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % hw.WARPGROUP_WARPS
    first = warp * 16 + lane // 4
    rows = (
        row_of(plan, work, scalars, team, first),
        row_of(plan, work, scalars, team, first + 8),
    )
    return Lane(team, warp, lane % 4 * 2, rows)


@cute.jit
def row_of(plan: Plan90, work: Work, scalars: Scalars, team: Int32, row: Int32) -> Row:
    """Row `row` of query tile `team`, and which keys it sees."""
    config = plan.config
    tile, heads = own_tile(plan, work, team), plan.layout.box_heads
    token = first_token(plan, tile) + row // heads
    head = work.head * config.group + first_head(plan, tile) + row % heads
    if cutlass.const_expr(plan.layout.q_rows < plan.layout.rows):
        if row >= plan.layout.q_rows:
            token, head = work.q_length, work.head * config.group
    begin, end, sink_end = Int32(0), work.full_end, Int32(0)
    if cutlass.const_expr(config.right):
        end = row_end(work, token, scalars)
    if cutlass.const_expr(config.left):
        begin = row_begin(work, token, scalars)
    if cutlass.const_expr(config.sink_tokens):
        sink_end = cutlass.min(scalars.sink_tokens, end)
    return Row(token, head, begin, end, sink_end)
