"""Where the threads of a warpgroup meet (device code)."""

import cutlass.cute as cute
from cutlass import Boolean, Int32

from fmha.shared.lanes import Lane
from fmha.sm90.plan import TILE_BARRIER
from kernelkit.plan import hw

THREADS = hw.WARPGROUP_WARPS * hw.WARP_THREADS


@cute.jit
def meet(lane: Lane) -> None:
    """All threads of the warpgroup."""
    cute.arch.barrier(barrier_id=TILE_BARRIER + lane.team, number_of_threads=THREADS)


@cute.jit
def any_of(lane: Lane, mine: Boolean) -> Boolean:
    """Whether it is so for any thread of the warpgroup; all of them meet."""
    found = cute.arch.inline_ptx(
        "{ .reg .pred mine, any; setp.ne.s32 mine, {$r0}, 0; "
        "barrier.cta.red.or.aligned.pred any, {$r1}, {$r2}, mine; "
        "selp.s32 {$w0}, 1, 0, any; }",
        write_only_types=[Int32],
        read_only_args=[Int32(mine), Int32(TILE_BARRIER + lane.team), Int32(THREADS)],
    )
    return cute.arch.vote_any_sync(found != 0)  # as ptxas then knows, the same for all lanes
