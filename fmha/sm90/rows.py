"""Which rows of a query tile a thread of a warpgroup has (device code)."""

import cutlass.cute as cute
from cutlass import Int32

from fmha.shared.args import Scalars, Work
from fmha.shared.lanes import Lane
from fmha.shared.walk import row_of
from fmha.sm90.plan import Plan90
from kernelkit.plan import hw


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
    real = (rows[0].token < work.q_length, rows[1].token < work.q_length)
    return Lane(team, tile, part, first, warp, lane % 4 * 2, rows, real)
