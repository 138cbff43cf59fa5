"""Which rows and columns of a query tile a thread has: two rows, every fourth pair of their columns
(device code)."""

from dataclasses import dataclass

from cutlass import Boolean, Int32

from fmha.shared.args import Row


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
    real: tuple[Boolean, Boolean]  # whether the entry has them; others hold anything
