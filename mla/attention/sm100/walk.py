"""Query rows of a thread (device code)."""

import cutlass.cute as cute

from mla.attention.shared.work import Work, row_of
from mla.attention.sm100.args import Lane
from mla.attention.sm100.plan import PAIR, ROWS, Plan100


@cute.jit
def lane_of(plan: Plan100, work: Work) -> Lane:
    """Return this thread's half of a query row."""
    lane = cute.arch.thread_idx()[0] % (PAIR * ROWS)
    number, half = lane % ROWS, lane // ROWS
    row = row_of(plan, work, number)
    return Lane(lane, number, half, row.token, row.head, row.real, row.end)
