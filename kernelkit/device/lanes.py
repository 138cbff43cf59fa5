"""Collective operations of the lanes of a warp (device code)."""

import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def sum_below(value: Int32, lane: Int32) -> Int32:
    """The sum over all lower lanes."""
    total = value
    for step in (1, 2, 4, 8, 16):
        lower = cute.arch.shuffle_sync_up(total, step)
        total = total + (lower if lane >= step else Int32(0))
    return total - value
