"""Exchange of numbers between the two threads of a query row (device code)."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernelkit.device.barriers import meet
from kernelkit.plan import hw
from mla.attention.sm100.args import Lane, Scope
from mla.attention.sm100.plan import PAIR, ROWS, Plan100


@cute.jit
def of_other_half(
    plan: Plan100, scope: Scope, lane: Lane, value: Float32, turn: Int32 | cutlass.Constexpr
) -> Float32:
    """Return the number of the thread that has the other half of the row, and give it `value`.

    turn: slots, 0 and 1 alternate from tile to tile, 2 is for the end. A slot is rewritten only
    after the barrier of a call in between, which its reader has passed.
    """
    lanes = PAIR * ROWS
    slots = cute.make_tensor(scope.buffers.halves + turn * lanes, cute.make_layout(lanes))
    slots[lane.lane] = value
    meet(plan.barriers, "halves", lane.row // hw.WARP_THREADS)
    return slots[lane.lane ^ ROWS]
