"""What warpgroups that share a query tile publish (device code): P of their key tiles with the
maxima that it refers to, and at the end the sums of their weights.

The same thread has the same two rows in all of them.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp

from fmha.shared.lanes import Lane
from fmha.sm90.plan import Plan90
from fmha.sm90.products import make_qk_mma, shared_p
from kernelkit.device.barriers import meet

MAXIMUM, SUM = 0, 1  # which of the numbers of a row


@cute.jit
def share_p(plan: Plan90, lane: Lane, p: cute.Tensor, buffer: cute.Pointer) -> None:
    """P of this warpgroup's key tile, in registers like S, into its place in shared memory."""
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), p.element_type)
    copy = cute.make_tiled_copy_C(atom, make_qk_mma(plan))
    thread, _, _ = cute.arch.thread_idx()
    part = copy.get_slice(thread % plan.roles["math"].team_threads)
    own = shared_p(plan, buffer)[None, None, lane.part]
    cute.copy(copy, part.retile(p), part.partition_D(own))
    cute.arch.fence_proxy("async.shared", space="cta")


@cute.jit
def publish(
    plan: Plan90,
    lane: Lane,
    buffer: cute.Pointer,
    kind: cutlass.Constexpr,
    own: tuple[Float32, Float32],
) -> None:
    """Publish a number of each of two rows."""
    numbers = published(plan, buffer, kind)
    for half in cutlass.range_constexpr(2):
        if lane.column == 0:
            numbers[lane.first_row + 8 * half, lane.part] = own[half]


@cute.jit
def read_published(
    plan: Plan90, lane: Lane, buffer: cute.Pointer, kind: cutlass.Constexpr, part: Int32
) -> tuple[Float32, Float32]:
    """Return the number that warpgroup `part` of the query tile published, of each of two rows."""
    numbers = published(plan, buffer, kind)
    return numbers[lane.first_row, part], numbers[lane.first_row + 8, part]


@cute.jit
def published(plan: Plan90, buffer: cute.Pointer, kind: cutlass.Constexpr) -> cute.Tensor:
    """Numbers of one kind, (row, warpgroup)."""
    shape = (plan.layout.rows, plan.layout.sharers)
    return cute.make_tensor(buffer + kind * cute.size(shape), cute.make_layout(shape))


@cute.jit
def sums_of_all(
    plan: Plan90, lane: Lane, buffer: cute.Pointer, own: tuple[Float32, Float32]
) -> tuple[Float32, Float32]:
    """Return the sums over all warpgroups of the tile of each of two rows; all of them meet."""
    publish(plan, lane, buffer, SUM, own)
    meet(plan.barriers, "sums")
    first, second = read_published(plan, lane, buffer, SUM, 0)
    for part in cutlass.range_constexpr(1, plan.layout.sharers):
        others = read_published(plan, lane, buffer, SUM, part)
        first, second = first + others[0], second + others[1]
    return first, second
