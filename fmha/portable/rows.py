"""Which rows of a query tile a lane has (device code)."""

import cutlass.cute as cute
from cutlass import Int32

from fmha.portable.args import Place
from fmha.portable.layout import ROWS
from fmha.portable.plan import PortablePlan
from fmha.shared.args import Scalars, Work
from fmha.shared.lanes import Lane
from fmha.shared.walk import row_of


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
