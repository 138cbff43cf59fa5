"""Softmax role: four warps per query tile, a row per thread (in a CTA pair half a row): S -> P.

Per tile: read S, mask it in boundary tiles, exponentiate, write P, rescale O where the row maximum
moved (`correction`), signal. The row sum comes after the signal: the MMA warp has no use for it. At
the end the row is stored (`epilogue`). In the ping-pong schedule the correction warps rescale and
store, and this role only tells them by how much.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.pipeline import PipelineState

from fmha.layout import TILE_N
from fmha.plan import AttentionPlan
from fmha.sm100.args import Lane, Scope, Walk, Work
from fmha.sm100.roles.correction import clear_tail_rows, rescale_output
from fmha.sm100.roles.epilogue import store_results
from fmha.sm100.roles.publish import store_p
from fmha.sm100.roles.rows import from_other_half, own_row, publish_statistics
from fmha.sm100.walk import tile_of
from kernelkit import tmem
from kernelkit.online_softmax import (
    CHUNK,
    exponentiate,
    keep_columns,
    next_max,
    row_total,
    softcap_scores,
    top_score,
)
from kernelkit.pipelines import consumer_state, producer_state


class Softmax:
    """Turns S into P; `corrects`: it also keeps O consistent with the maxima, and stores it."""

    def __init__(self, plan: AttentionPlan) -> None:
        self.plan = plan
        self.role = plan.roles["softmax"]
        self.corrects = plan.config.q_tiles == 1

    @cute.jit
    def run(self, work: Work, walk: Walk, scope: Scope) -> None:
        """Whole life of the warps. Boundary tiles come first, so two copies of the loop do."""
        scores = cute.make_rmem_tensor(self.plan.layout.lane_columns, Float32)
        row = own_row(self.plan, work, scope.scalars, self.own_q_tile())
        lane = Lane(row, scores, scope.scalars, scope.buffers, scope.pipes)
        if cutlass.const_expr(self.corrects and self.plan.config.ragged_keys):
            clear_tail_rows(self.plan, walk, lane)
        s_state = consumer_state(self.plan.layout.lead)
        o_state = producer_state(1)  # O is taken for rescaling like a buffer that starts out free
        row_max, row_sum = -Float32.inf, Float32(0.0)
        for step in cutlass.range(walk.masked, unroll=1):
            first_key = tile_of(self.plan, walk, step) * TILE_N
            row_max, row_sum = self.do_tile(lane, row_max, row_sum, s_state, o_state, first_key)
            s_state.advance()
            o_state.advance()
        for _ in cutlass.range(walk.free, unroll=1):
            row_max, row_sum = self.do_tile(lane, row_max, row_sum, s_state, o_state, None)
            s_state.advance()
            o_state.advance()
        if cutlass.const_expr(self.plan.config.ctas == 2):
            row_sum += from_other_half(self.plan, lane, row_sum, s_state.index)
        if cutlass.const_expr(self.corrects):
            if walk.tiles > 0:
                lane.pipes.o.wait(o_state)
            store_results(self.plan, work, walk, lane, row_max, row_sum, scope.tensors)
        else:
            publish_statistics(lane, (row_sum, row_max))

    @cute.jit
    def own_q_tile(self) -> Int32:
        """Which of the CTA's query tiles this warp works for."""
        q_tile = Int32(0)
        if cutlass.const_expr(self.role.teams > 1):
            q_tile = cute.arch.make_warp_uniform(
                cute.arch.thread_idx()[0] // self.role.team_threads
            )
        return q_tile

    @cute.jit
    def do_tile(
        self,
        lane: Lane,
        row_max: Float32,
        row_sum: Float32,
        s_state: PipelineState,
        o_state: PipelineState,
        first_key: Int32 | None,
    ) -> tuple[Float32, Float32]:
        """One tile from S to a published P; returns the new (row_max, row_sum).

        The pipeline states are read only. first_key: of the tile, None where the row sees all of
        it.
        """
        scale_log2, q_tile = lane.scalars.scale_log2, lane.row.q_tile
        stage = s_state.index + q_tile
        lane.pipes.s.wait(s_state, q_tile)
        self.read_scores(lane, stage)
        if cutlass.const_expr(self.plan.config.softcap):
            softcap_scores(lane.scores, lane.scalars.softcap_log2)
        if cutlass.const_expr(first_key is not None):
            self.mask(lane, first_key)
        top = top_score(lane.scores, row_max)
        if cutlass.const_expr(self.plan.config.ctas == 2):
            top = cutlass.max(top, from_other_half(self.plan, lane, top, stage))
        row_max, acc_scale = next_max(top, row_max, scale_log2, self.plan.config.rescale_log2)
        if cutlass.const_expr(not self.corrects):
            publish_statistics(lane, (acc_scale,))
            cute.arch.sync_warp()  # ptxas otherwise sinks the store under the exponentials
        exponentiate(lane.scores, row_max, scale_log2)
        if cutlass.const_expr(self.corrects and self.plan.config.p_in_smem):
            lane.pipes.o.wait(o_state)  # the P V before has read the one buffer of P
        store_p(self.plan, lane, stage)
        if cutlass.const_expr(self.corrects):
            if cutlass.const_expr(not self.plan.config.p_in_smem):
                lane.pipes.o.wait(o_state)
            rescale_output(self.plan, lane, acc_scale)
        tmem.wait_stores()
        tmem.order_before_signal()
        lane.pipes.p.signal(stage)
        if cutlass.const_expr(not self.corrects):
            # For the next `publish_statistics`. Here, because the branch of a wait keeps ptxas from
            # moving the row sum in front of the signal, and the warps that it waits for are long
            # through.
            lane.pipes.row.wait_free(s_state, q_tile)
        return row_max, row_sum * acc_scale + row_total(lane.scores)

    @cute.jit
    def read_scores(self, lane: Lane, stage: Int32) -> None:
        """This thread's part of S[stage] into its registers."""
        tmem.order_after_wait()
        columns = self.plan.tmem["S0"].columns
        begin = self.plan.tmem["S0"].begin + stage * columns
        for column in cutlass.range_constexpr(0, columns, CHUNK):
            tile = tmem.tile_at(lane.buffers.tmem, begin + column, CHUNK)
            part = tmem.columns_of(lane.scores, column, CHUNK)
            tmem.load_row(tile, part, lane.row.lane)
        tmem.wait_loads()

    @cute.jit
    def mask(self, lane: Lane, first_key: Int32) -> None:
        """Keys that the row does not see score -inf."""
        row, config = lane.row, self.plan.config
        first = first_key + row.half * self.plan.layout.lane_columns
        keep_columns(
            lane.scores,
            row.end - first,
            row.begin - first if cutlass.const_expr(config.left) else None,
            row.sink_end - first if cutlass.const_expr(config.sink_tokens) else None,
        )
