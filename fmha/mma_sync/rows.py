"""Which rows of a query tile a lane has (device code)."""

import cutlass.cute as cute
from cutlass import Int32

from fmha.device.args import Scalars, Work
from fmha.device.lanes import Lane
from fmha.device.walk import row_of
from fmha.mma_sync.args import Place
from fmha.mma_sync.layout import ROWS
from fmha.mma_sync.plan import PortablePlan


@cute.jit
def own_lane(
    plan: PortablePlan,
    work: Work,
    scalars: Scalars,
    place: Place,
    row_tile: Int32,
    part: Int32,
) -> Lane:
    """The lane's place in 16 rows of its team, those of `row_tile`; part: whose O it stores."""
    first = row_tile * ROWS + place.lane // 4
    rows = (
        row_of(plan, work, scalars, place.team, first),
        row_of(plan, work, scalars, place.team, first + 8),
    )
    real = (rows[0].token < work.q_length, rows[1].token < work.q_length)
    column = place.lane % 4 * 2
    return Lane(place.team, place.team, part, first, Int32(0), column, rows, real)
