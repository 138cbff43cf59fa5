"""Correction role: four warps keep O right while it is summed up, and store it: a row a thread.

`rescale_output` multiplies rows of O whose reference maximum moved. `clear_tail_rows` zeroes V rows
past the last key that any row sees: their weight is 0, but 0 * NaN is NaN, and memory that a length
or an offset excludes may hold anything. Rows past the end of the tensor need no such care: TMA
fills them with zeros.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fmha.shared.args import IO_TYPES, Scope, Walk, Work
from fmha.shared.epilogue import finish, own_sink, store_statistics
from fmha.shared.fp8 import value_scale
from fmha.shared.walk import count_rounds, first_key, locate, plan_walk, stored_by_tma
from fmha.sm100.plan import Plan
from fmha.sm100.roles.epilogue import Factors, store_piece
from fmha.sm100.roles.rows import Lane, o_column, own_row, read_published, told_in_log2
from kernelkit.device import tmem
from kernelkit.device.narrow import inverse_of
from kernelkit.device.pipelines import consumer_state, producer_state

CHUNK = 16  # columns of O in flight: enough to hide latency, few enough not to spill


class Correction:
    """Both repairs, and the epilogue, for all query tiles."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.role = plan.roles["correction"]

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warps."""
        plan, pipes, order = self.plan, scope.pipes, scope.tensors.order
        q_tiles, v_stages = plan.layout.q_tiles, plan.layout.stages[1]
        row_state, o_state, tail_state = (consumer_state(1) for _ in range(3))
        out_state = producer_state(plan.layout.out_stages)
        narrow = inverse_of(scope.tensors.tables.out_scale)
        v_first = Int32(0)  # stage of the V ring where the block begins
        for turn in cutlass.range(count_rounds(plan, order), unroll=1):
            work = locate(plan, scope.tensors, turn)
            walk = plan_walk(plan, work, scope.scalars)
            lanes = [self.own_lane(work, scope, q_tile) for q_tile in range(q_tiles)]
            sinks = [own_sink(plan, lane.row.head, scope.tensors) for lane in lanes]
            if cutlass.const_expr(plan.config.ragged_keys):
                if walk.tiles > 0:
                    pipes.tail.wait(tail_state)
                    tail_state.advance()
                    clear_tail_rows(plan, walk, lanes[0], v_first)
                    v_first = (v_first + walk.tiles * plan.layout.v_pieces) % v_stages
                    pipes.tail.release(0)
                    for q_tile in cutlass.range_constexpr(q_tiles):
                        pipes.o.release(q_tile)
            for _ in cutlass.range(1, walk.tiles, unroll=1):
                for q_tile in cutlass.range_constexpr(q_tiles):
                    (acc_scale,) = read_published(lanes[q_tile], row_state, 1)
                    pipes.o.wait(o_state, q_tile)
                    rescale_output(plan, lanes[q_tile], acc_scale)
                    tmem.wait_stores()
                    tmem.order_before_signal()
                    pipes.o.release(q_tile)
                row_state.advance()
                o_state.advance()
            for q_tile in cutlass.range_constexpr(q_tiles):
                lane = lanes[q_tile]
                row_sum, row_max = read_published(lane, row_state, 2)
                if walk.tiles > 0:
                    pipes.o.wait(o_state, q_tile)
                scale_log2, sink = lane.scalars.scale_log2, sinks[q_tile]
                if cutlass.const_expr(told_in_log2(plan)):
                    scale_log2 = Float32(1.0)
                factor, lse, max_log2 = finish(plan, scale_log2, row_max, row_sum, sink)
                # In a CTA pair only one of a row's two lanes stores its statistics.
                if lane.row.token < work.q_length and lane.row.half == 0:
                    store_statistics(plan, work, lane.row, lse, max_log2, scope)
                scale = value_scale(scope.tensors.tables, work)
                if cutlass.const_expr(scale is not None):
                    factor = factor * scale if cutlass.const_expr(plan.config.normalize) else scale
                factors = Factors(factor, narrow)
                for piece in cutlass.range_constexpr(plan.layout.out_pieces):
                    if stored_by_tma(plan, work):
                        pipes.out.wait_free(out_state)
                    store_piece(plan, work, walk, lane, factors, piece, out_state.index, scope)
                    if stored_by_tma(plan, work):
                        out_state.advance()
            row_state.advance()
            if walk.tiles > 0:
                o_state.advance()

    @cute.jit
    def own_lane(self, work: Work, scope: Scope, q_tile: cutlass.Constexpr) -> Lane:
        """This thread's row of one query tile; the correction has no scores."""
        row = own_row(self.plan, work, scope, Int32(q_tile))
        return Lane(row, None, scope.scalars, scope.buffers, scope.pipes)


@cute.jit
def rescale_output(plan: Plan, lane: Lane, acc_scale: Float32) -> None:
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
def clear_tail_rows(plan: Plan, walk: Walk, lane: Lane, first: Int32) -> None:
    """Zero the rows of the first V tile past what any row sees, before O is given to its P V.

    The walk starts at the last tile. The `tail` edge has told this role, not the MMA warp, that it
    landed. first: its stage of the V ring; its pieces follow. Generic-proxy stores are fenced for
    the async proxy of the MMA.
    """
    valid = walk.seen_end - first_key(plan, walk, 0)
    io, layout = IO_TYPES[plan.config.keys_dtype], plan.layout
    if lane.row.lane >= valid and lane.row.lane < layout.tile_n:
        line = layout.panel(layout.v_columns)
        panels = layout.v_columns // line
        zeros = cute.make_rmem_tensor(line, io)
        zeros.fill(0.0)
        for piece in cutlass.range_constexpr(layout.v_pieces):
            stage = (first + piece) % layout.stages[1]
            for panel in cutlass.range_constexpr(panels):
                # A line of zeros needs no swizzle: it stays within the line.
                row = (stage * panels + panel) * layout.tile_n + lane.row.lane
                start = lane.buffers.v + row * line
                cute.autovec_copy(zeros, cute.make_tensor(start, cute.make_layout(line)))
    cute.arch.fence_proxy("async.shared", space="cta")
