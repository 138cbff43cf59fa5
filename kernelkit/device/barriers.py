"""Named barriers of a plan in device code.

One of several alike ones has a number; where it has several parts, they are added up.
"""

import cutlass.cute as cute
from cutlass import Boolean, Int32

from kernelkit.plan.barriers import BarrierPlan


def meet(barriers: BarrierPlan, name: str, *number: Int32) -> None:
    """Wait for all threads of the barrier."""
    cute.arch.barrier(
        barrier_id=sum(number, barriers.ids(name).start),
        number_of_threads=barriers[name].threads,
    )


def arrive(barriers: BarrierPlan, name: str, *number: Int32) -> None:
    """Arrive at the barrier, without waiting."""
    cute.arch.barrier_arrive(
        barrier_id=sum(number, barriers.ids(name).start),
        number_of_threads=barriers[name].threads,
    )


@cute.jit
def any_of(barriers: BarrierPlan, name: str, number: Int32, mine: Boolean) -> Boolean:
    """Whether `mine` is so for any thread of the barrier; all of them meet."""
    found = cute.arch.inline_ptx(
        "{ .reg .pred mine, any; setp.ne.s32 mine, {$r0}, 0; "
        "barrier.cta.red.or.aligned.pred any, {$r1}, {$r2}, mine; "
        "selp.s32 {$w0}, 1, 0, any; }",
        write_only_types=[Int32],
        read_only_args=[
            Int32(mine),
            Int32(barriers.ids(name).start + number),
            Int32(barriers[name].threads),
        ],
    )
    return cute.arch.vote_any_sync(found != 0)  # as ptxas then knows, the same for all lanes
