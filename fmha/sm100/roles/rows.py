"""Who owns which query row, and how threads tell each other about one (device code).

One thread holds a row, in a CTA pair the two halves of it lie with threads r and rows + r. In the
ping-pong schedule the softmax thread of a row tells its correction thread what to do.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.pipeline import PipelineState

from fmha.plan import HALVES_BARRIER, AttentionPlan
from fmha.sm100.args import Lane, Row, Scalars, Work
from fmha.sm100.walk import first_row, row_begin, row_end
from kernelkit import hw


@cute.jit
def own_row(plan: AttentionPlan, work: Work, scalars: Scalars, q_tile: Int32) -> Row:
    """This thread's row of query tile `q_tile`, and which keys it sees."""
    config, rows = plan.config, plan.layout.rows
    thread, _, _ = cute.arch.thread_idx()
    lane = thread % hw.TMEM_LANES
    row, half = lane % rows, lane // rows
    token, head = first_row(plan, work, q_tile) + row, work.head
    if cutlass.const_expr(config.pack_heads):
        token, head = token // work.group, head + token % work.group
    begin, end, sink_end = Int32(0), work.full_end, Int32(0)
    if cutlass.const_expr(config.right):
        end = row_end(work, token, scalars)
    if cutlass.const_expr(config.left):
        begin = row_begin(work, token, scalars)
    if cutlass.const_expr(config.sink_tokens):
        sink_end = cutlass.min(scalars.sink_tokens, end)
    return Row(lane, row, half, q_tile, token, head, begin, end, sink_end)


@cute.jit
def o_column(plan: AttentionPlan, lane: Lane) -> Int32:
    """TMEM column where O of the lane's query tile begins."""
    return plan.tmem["O0"].begin + lane.row.q_tile * plan.tmem["O0"].columns


@cute.jit
def publish_statistics(lane: Lane, values: tuple[Float32, ...]) -> None:
    """Pass one or two numbers about this row, whose slot is free, to the correction warps."""
    for index in cutlass.range_constexpr(len(values)):
        slot(lane, index)[0] = values[index]
    lane.pipes.row.signal(lane.row.q_tile)


@cute.jit
def read_statistics(
    lane: Lane, state: PipelineState, count: cutlass.Constexpr
) -> tuple[Float32, ...]:
    """The numbers that the softmax warps passed about this row."""
    lane.pipes.row.wait(state, lane.row.q_tile)
    values = tuple(slot(lane, index)[0] for index in range(count))
    lane.pipes.row.release(lane.row.q_tile)
    return values


@cute.jit
def slot(lane: Lane, index: cutlass.Constexpr) -> cute.Tensor:
    """Number `index` of this row, (1,) in the statistics buffer, for two query tiles in turn."""
    place = (2 * index + lane.row.q_tile) * hw.TMEM_LANES + lane.row.lane
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
