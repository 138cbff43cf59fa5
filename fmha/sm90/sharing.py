"""What warpgroups that share a query tile tell each other (device code): P by whole tiles, maxima
and sums of rows. All of it is nothing where each has a tile of its own.

Two P buffers take turns. A warpgroup writes P of a tile once it has waited for its P V of the tile
before, and all meet before the next P V: so nobody still reads the buffer that is written.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import warp

from fmha.sm90.barriers import THREADS, any_of, any_of_threads
from fmha.sm90.layout import P_STAGES
from fmha.sm90.plan import SHARED_BARRIER, Plan90
from fmha.sm90.products import K, make_qk_mma, panels
from fmha.sm90.rows import Lane
from kernelkit.umma import shared

MAXIMUM, SUM = 0, 1  # which of the numbers of a row


@cute.jit
def share_p(plan: Plan90, lane: Lane, p: cute.Tensor, buffer: cute.Pointer, place: Int32) -> None:
    """This warpgroup's columns of P into buffer `place`; others see them once all have met."""
    if cutlass.const_expr(plan.layout.sharers > 1):
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), p.element_type)
        copy = cute.make_tiled_copy_C(atom, make_qk_mma(plan))
        thread, _, _ = cute.arch.thread_idx()
        part = copy.get_slice(thread % THREADS)
        every = shared(buffer, panels(plan, K, plan.layout.rows, plan.layout.tile_n, P_STAGES))
        whole = every[None, None, place]
        own = cute.local_tile(whole, (plan.layout.rows, plan.layout.keys), (0, lane.part))
        cute.copy(copy, part.retile(p), part.partition_D(own))
        cute.arch.fence_proxy("async.shared", space="cta")


@cute.jit
def any_of_tile(plan: Plan90, lane: Lane, mine: Boolean) -> Boolean:
    """Whether it is so for any thread of the query tile; all of them meet."""
    if cutlass.const_expr(plan.layout.sharers == 1):
        return any_of(lane, mine)
    return any_of_threads(SHARED_BARRIER, plan.layout.sharers * THREADS, mine)


@cute.jit
def meet_tile(plan: Plan90) -> None:
    """All threads of the query tile, where warpgroups share it."""
    if cutlass.const_expr(plan.layout.sharers > 1):
        threads = plan.layout.sharers * THREADS
        cute.arch.barrier(barrier_id=SHARED_BARRIER, number_of_threads=threads)


@cute.jit
def of_all_parts(
    plan: Plan90,
    lane: Lane,
    buffer: cute.Pointer,
    kind: cutlass.Constexpr,
    own: tuple[Float32, Float32],
) -> tuple[Float32, Float32]:
    """The maximum, or the sum, of what all warpgroups of the tile have of each of two rows. Between
    two calls for one kind all have to meet."""
    layout = plan.layout
    if cutlass.const_expr(layout.sharers == 1):
        return own
    shape = (layout.rows, layout.sharers)
    told = cute.make_tensor(buffer + kind * cute.size(shape), cute.make_layout(shape))
    first, found = lane.first_row, []
    for half in cutlass.range_constexpr(2):
        if lane.column == 0:
            told[first + 8 * half, lane.part] = own[half]
    meet_tile(plan)
    for half in cutlass.range_constexpr(2):
        value = told[first + 8 * half, 0]
        for part in cutlass.range_constexpr(1, layout.sharers):
            other = told[first + 8 * half, part]
            if cutlass.const_expr(kind == MAXIMUM):
                value = cute.arch.fmax(value, other)
            else:
                value = value + other
        found.append(value)
    return tuple(found)
