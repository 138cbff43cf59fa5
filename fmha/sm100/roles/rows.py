"""Who owns which query row, and how threads tell each other about one (device code).

One thread holds a row, in a CTA pair the two halves of it lie with threads r and rows + r. The
softmax thread of a row tells its correction thread what to do.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.pipeline import PipelineState

from fmha.shared.args import Scalars, Work
from fmha.shared.walk import row_of
from fmha.sm100.args import Lane, OwnRow
from fmha.sm100.layout import STATISTICS
from fmha.sm100.plan import Plan
from kernelkit.device.barriers import meet
from kernelkit.plan import hw


@cute.jit
def own_row(plan: Plan, work: Work, scalars: Scalars, q_tile: Int32) -> OwnRow:
    """This thread's row of query tile `q_tile`, and which keys it sees."""
    rows = plan.layout.rows
    thread, _, _ = cute.arch.thread_idx()
    lane = thread % hw.TMEM_LANES
    row, half = lane % rows, lane // rows
    of = row_of(plan, work, scalars, q_tile, row)
    return OwnRow(of.token, of.head, of.begin, of.end, of.sink_end, lane, row, half, q_tile)


@cute.jit
def o_column(plan: Plan, lane: Lane) -> Int32:
    """TMEM column where O of the lane's query tile begins."""
    return plan.tmem["O0"].begin + lane.row.q_tile * plan.tmem["O0"].columns


def told_in_log2(plan: Plan) -> bool:
    """Whether a row's maximum is told in log2 units: where its scores have a scale of their own,
    beyond that of the launch. With a softcap that scale comes before the scores."""
    return plan.config.is_fp8 and not plan.config.softcap


@cute.jit
def publish(lane: Lane, values: tuple[Float32, ...]) -> None:
    """Tell the correction one or two numbers about this row, whose slots are free."""
    for number in cutlass.range_constexpr(len(values)):
        slot(lane, number)[0] = values[number]
    lane.pipes.row.signal(lane.row.q_tile)


@cute.jit
def read_published(
    lane: Lane, state: PipelineState, count: cutlass.Constexpr
) -> tuple[Float32, ...]:
    """The numbers that the softmax warps told about this row."""
    lane.pipes.row.wait(state, lane.row.q_tile)
    values = tuple(slot(lane, number)[0] for number in range(count))
    lane.pipes.row.release(lane.row.q_tile)
    return values


@cute.jit
def slot(lane: Lane, number: cutlass.Constexpr) -> cute.Tensor:
    """A number of this row, (1,) in the statistics buffer."""
    place = (STATISTICS * lane.row.q_tile + number) * hw.TMEM_LANES + lane.row.lane
    return cute.make_tensor(lane.buffers.statistics + place, cute.make_layout(1))


@cute.jit
def from_other_half(plan: Plan, lane: Lane, value: Float32, turn: Int32) -> Float32:
    """What the thread with the other half of the row passes as `value`.

    turn: of the slots; 0 and 1 alternate from tile to tile, 2 is for the end of the block. A slot
    is then rewritten only behind the barrier of a call between, which its reader has passed.
    """
    first = (STATISTICS * plan.layout.q_tiles + turn) * hw.TMEM_LANES
    slots = cute.make_tensor(lane.buffers.statistics + first, cute.make_layout(hw.TMEM_LANES))
    slots[lane.row.lane] = value
    # The halves of a row lie with warps w and w + 2: the other two need not be waited for.
    meet(plan.barriers, "halves", lane.row.row // hw.WARP_THREADS)
    return slots[lane.row.lane ^ plan.layout.rows]
