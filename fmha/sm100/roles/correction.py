"""What is repaired so that O += P V stays right: by the softmax warps, or in the ping-pong schedule
by warps of their own (device code).

`rescale_output` multiplies rows of O whose reference maximum moved. `clear_tail_rows` zeroes V rows
past the last key that any row sees: their weight is 0, but 0 * NaN is NaN, and memory that a length
or an offset excludes may hold anything. Rows past the end of the tensor need no such care: TMA
fills them with zeros.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fmha.layout import TILE_N
from fmha.plan import AttentionPlan
from fmha.sm100.args import Lane, Scope, Walk, Work
from fmha.sm100.products import IO_TYPES
from fmha.sm100.roles.epilogue import store_results
from fmha.sm100.roles.rows import o_column, own_row, read_statistics
from fmha.sm100.walk import tile_of
from kernelkit import tmem
from kernelkit.pipelines import consumer_state, producer_state

CHUNK = 16  # columns of O in flight: enough to hide latency, few enough not to spill


class Correction:
    """The role of the ping-pong schedule: both repairs, and the epilogue, for both query tiles."""

    def __init__(self, plan: AttentionPlan) -> None:
        self.plan = plan
        self.role = plan.roles["correction"]

    @cute.jit
    def run(self, work: Work, walk: Walk, scope: Scope) -> None:
        """Whole life of the warps."""
        q_tiles = self.plan.config.q_tiles
        lanes = [self.own_lane(work, scope, q_tile) for q_tile in range(q_tiles)]
        if cutlass.const_expr(self.plan.config.ragged_keys):
            clear_tail_rows(self.plan, walk, lanes[0])
        row_state, o_state = consumer_state(1), producer_state(1)
        for _ in cutlass.range(walk.tiles, unroll=1):
            for q_tile in cutlass.range_constexpr(q_tiles):
                (acc_scale,) = read_statistics(lanes[q_tile], row_state, 1)
                scope.pipes.o.wait(o_state, q_tile)
                rescale_output(self.plan, lanes[q_tile], acc_scale)
                tmem.wait_stores()
                tmem.order_before_signal()
                scope.pipes.rescaled.signal(q_tile)
            row_state.advance()
            o_state.advance()
        for q_tile in cutlass.range_constexpr(q_tiles):
            row_sum, row_max = read_statistics(lanes[q_tile], row_state, 2)
            if walk.tiles > 0:
                scope.pipes.o.wait(o_state, q_tile)
            store_results(self.plan, work, walk, lanes[q_tile], row_max, row_sum, scope.tensors)

    @cute.jit
    def own_lane(self, work: Work, scope: Scope, q_tile: cutlass.Constexpr) -> Lane:
        """This thread's row of one query tile; the correction has no scores."""
        row = own_row(self.plan, work, scope.scalars, Int32(q_tile))
        return Lane(row, None, scope.scalars, scope.buffers, scope.pipes)


@cute.jit
def rescale_output(plan: AttentionPlan, lane: Lane, acc_scale: Float32) -> None:
    """The lane's columns of O *= acc_scale, skipped by a warp none of whose rows needs it.

    The caller has waited for the P V before, and signals the P V after: O is at rest.
    """
    if cute.arch.vote_any_sync(acc_scale < 1.0):
        tmem.order_after_wait()
        begin = o_column(plan, lane)
        for column in cutlass.range_constexpr(0, plan.tmem["O0"].columns, CHUNK):
            tile = tmem.tile_at(lane.buffers.tmem, begin + column, CHUNK)
            part = cute.make_rmem_tensor(CHUNK, Float32)
            tmem.load_row(tile, part, lane.row.lane)
            tmem.wait_loads()
            part.store(part.load() * acc_scale)
            tmem.store_row(part, tile, lane.row.lane)


@cute.jit
def clear_tail_rows(plan: AttentionPlan, walk: Walk, lane: Lane) -> None:
    """Zero the rows of the first V tile past what any row sees, before any P is published.

    The walk starts at the last tile, whose pieces are the first fill of the V ring. The `tail` edge
    has told this role, not the MMA warp, that they landed; the first P signal passes it on.
    Generic-proxy stores are fenced for the async proxy of the MMA.
    """
    if walk.tiles > 0:
        lane.pipes.tail.wait(consumer_state(1))
        valid = walk.seen_end - tile_of(plan, walk, 0) * TILE_N
        if lane.row.lane >= valid:
            io = IO_TYPES[plan.config.dtype]
            line = plan.layout.panel(plan.layout.v_columns)
            panels = plan.config.v_dim // plan.config.ctas // line
            zeros = cute.make_rmem_tensor(line, io)
            zeros.fill(0.0)
            for panel in cutlass.range_constexpr(panels):
                # A line of zeros needs no swizzle: it stays within the line.
                start = lane.buffers.v + (panel * TILE_N + lane.row.lane) * line
                cute.autovec_copy(zeros, cute.make_tensor(start, cute.make_layout(line)))
        cute.arch.fence_proxy("async.shared", space="cta")
