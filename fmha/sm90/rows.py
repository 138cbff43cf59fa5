"""Which rows and columns of a query tile a thread has (device code): two rows, every fourth pair of
their columns."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32

from fmha.device.args import Row, Scalars, Work
from fmha.device.walk import row_of
from fmha.sm90.plan import Plan90
from kernelkit import hw


@dataclass(frozen=True)
class Lane:
    """A thread's place in its query tile."""

    team: Int32  # which of the warpgroups that compute
    tile: Int32  # which of the CTA's query tiles
    part: Int32  # of that tile: keys whose S, columns whose O it computes
    first_row: Int32  # of the tile; the other is 8 rows further
    warp: Int32  # of the warpgroup
    column: Int32  # its first one; the next is its neighbour, and so on every 8
    rows: tuple[Row, Row]


@cute.jit
def own_lane(plan: Plan90, work: Work, scalars: Scalars, team: Int32) -> Lane:
    """This thread's place in the block; team: its warpgroup."""
    tile, part = team // plan.layout.sharers, team % plan.layout.sharers
    lane = cute.arch.lane_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % hw.WARPGROUP_WARPS
    first = warp * 16 + lane // 4
    rows = (
        row_of(plan, work, scalars, tile, first),
        row_of(plan, work, scalars, tile, first + 8),
    )
    return Lane(team, tile, part, first, warp, lane % 4 * 2, rows)
