"""Who owns which query row, and how threads tell each other about one (device code).

One thread holds a row, in a CTA pair the two halves of it lie with threads r and rows + r. In the
ping-pong schedule the thread of the softmax and that of the correction tell each other.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.pipeline import PipelineState

from fmha.plan import AttentionPlan
from fmha.sm100.args import Lane, Row, Scalars, Work
from fmha.sm100.walk import first_row, row_begin, row_end
from kernelkit import hw

HALVES_BARRIER = 2  # and 3: named barriers of the softmax warps; 0 and 1 are the kernel's


@cute.jit
def own_row(plan: AttentionPlan, work: Work, scalars: Scalars, group: Int32) -> Row:
    """This thread's row of query tile `group`, and which keys it sees."""
    config, rows = plan.config, plan.layout.rows
    thread, _, _ = cute.arch.thread_idx()
    lane = thread % hw.TMEM_LANES
    row, half = lane % rows, lane // rows
    token, head = first_row(plan, work, group) + row, work.head
    if cutlass.const_expr(config.pack_heads):
        token, head = token // work.group, head + token % work.group
    begin, end, sink_end = Int32(0), work.full_end, Int32(0)
    if cutlass.const_expr(config.right):
        end = row_end(work, token, scalars)
    if cutlass.const_expr(config.left):
        begin = row_begin(work, token, scalars)
    if cutlass.const_expr(config.sink_tokens):
        sink_end = cutlass.min(scalars.sink_tokens, end)
    return Row(lane, row, half, group, token, head, begin, end, sink_end)


@cute.jit
def o_column(plan: AttentionPlan, lane: Lane) -> Int32:
    """TMEM column where O of the lane's query tile begins."""
    return plan.tmem["O0"].begin + lane.row.group * plan.tmem["O0"].columns


@cute.jit
def tell(lane: Lane, turn: PipelineState, values: tuple) -> None:
    """Pass one or two numbers about this row to the correction warps."""
    lane.pipes.row.wait_free(turn, lane.row.group)
    for index in cutlass.range_constexpr(len(values)):
        slot(lane, index)[0] = values[index]
    lane.pipes.row.signal(lane.row.group)


@cute.jit
def hear(lane: Lane, turn: PipelineState, count: cutlass.Constexpr) -> tuple:
    """The numbers that the softmax warps passed about this row."""
    lane.pipes.row.wait(turn, lane.row.group)
    values = tuple(slot(lane, index)[0] for index in range(count))
    lane.pipes.row.release(lane.row.group)
    return values


@cute.jit
def slot(lane: Lane, index: cutlass.Constexpr) -> cute.Tensor:
    """Number `index` of this row, (1,) in the statistics buffer."""
    place = (2 * index + lane.row.group) * hw.TMEM_LANES + lane.row.lane
    return cute.make_tensor(lane.buffers.statistics + place, cute.make_layout(1))


@cute.jit
def from_other_half(plan: AttentionPlan, lane: Lane, value: Float32, parity: Int32) -> Float32:
    """What the thread with the other half of the row passes as `value`.

    parity: alternates from call to call; a slot is then rewritten only behind the barrier of
    the call between, which its reader has passed.
    """
    slots = cute.make_tensor(
        lane.buffers.statistics + parity * hw.TMEM_LANES, cute.make_layout(hw.TMEM_LANES)
    )
    slots[lane.row.lane] = value
    # The halves of a row lie with warps w and w + 2: the other two need not be waited for.
    pair = lane.row.row // hw.WARP_THREADS
    cute.arch.barrier(barrier_id=HALVES_BARRIER + pair, number_of_threads=2 * hw.WARP_THREADS)
    return slots[lane.row.lane ^ plan.layout.rows]
