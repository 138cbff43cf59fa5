"""Softmax role: four warps, one query row per thread (in a CTA pair half a row), turn S into P.

Per tile: read S, mask it in boundary tiles, exponentiate, write P, let `correction` rescale O
where the row maximum moved, signal. The row sum comes after the signal: the MMA warp has no use
for it. At the end `epilogue` stores the row.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fmha.plan import TILE_N, AttentionPlan
from fmha.sm100.args import Lane, Scope, Walk, Work
from fmha.sm100.roles.correction import clear_tail_rows, rescale_output
from fmha.sm100.roles.epilogue import store_results
from fmha.sm100.roles.publish import store_p
from fmha.sm100.roles.rows import from_other_half, own_row, tell
from fmha.sm100.walk import tile_of
from kernelkit import tmem
from kernelkit.online_softmax import (
    CHUNK,
    exponentiate,
    keep_columns,
    next_max,
    row_total,
    squash,
    top_score,
)
from kernelkit.pipelines import draining, filling


class Softmax:
    """Turns S into P, keeps O consistent with the row maxima, stores the result."""

    def __init__(self, plan: AttentionPlan) -> None:
        self.plan = plan
        self.role = plan.roles["softmax"]
        self.corrects = plan.config.groups == 1

    @cute.jit
    def run(self, work: Work, walk: Walk, scope: Scope) -> None:
        """Whole life of the warps. Boundary tiles come first, so two copies of the loop do."""
        scores = cute.make_rmem_tensor(self.plan.layout.lane_columns, Float32)
        row = own_row(self.plan, work, scope.scalars, self.own_group())
        lane = Lane(row, scores, scope.scalars, scope.buffers, scope.pipes)
        if cutlass.const_expr(self.corrects and self.plan.config.ragged_keys):
            clear_tail_rows(self.plan, work, walk, lane)
        s_state = draining(self.plan.layout.lead)
        turn = filling(1)  # O, or the row's slot, is taken like a buffer that starts out free
        row_max, row_sum = -Float32.inf, Float32(0.0)
        for step in cutlass.range(walk.masked, unroll=1):
            first_key = tile_of(self.plan, walk, step) * TILE_N
            row_max, row_sum = self.do_tile(lane, (row_max, row_sum), (s_state, turn), first_key)
            s_state.advance()
            turn.advance()
        for _ in cutlass.range(walk.free, unroll=1):
            row_max, row_sum = self.do_tile(lane, (row_max, row_sum), (s_state, turn), None)
            s_state.advance()
            turn.advance()
        if cutlass.const_expr(self.plan.config.ctas == 2):
            row_sum += from_other_half(self.plan, lane, row_sum, s_state.index)
        if cutlass.const_expr(self.corrects):
            if walk.tiles > 0:
                lane.pipes.o.wait(turn)
            store_results(self.plan, work, walk, lane, (row_max, row_sum), scope.tensors)
        else:
            tell(lane, turn, (row_sum, row_max))

    @cute.jit
    def own_group(self) -> Int32:
        """Which of the CTA's query tiles this warp works for."""
        group = Int32(0)
        if cutlass.const_expr(self.role.groups > 1):
            group = cute.arch.make_warp_uniform(
                cute.arch.thread_idx()[0] // self.role.group_threads
            )
        return group

    @cute.jit
    def do_tile(
        self, lane: Lane, statistics: tuple, states: tuple, first_key: Int32 | None
    ) -> tuple:
        """One tile from S to a published P; returns (row_max, row_sum).

        states: (S, turn), read only. first_key: of the tile, None where the row sees all of it.
        """
        row_max, row_sum = statistics
        s_state, turn = states
        scale_log2, group = lane.scalars.scale_log2, lane.row.group
        stage = s_state.index + group
        lane.pipes.s.wait(s_state, group)
        self.read_scores(lane, stage)
        if cutlass.const_expr(self.plan.config.softcap):
            squash(lane.scores, lane.scalars.squash_log2)
        if cutlass.const_expr(first_key is not None):
            self.mask(lane, first_key)
        top = top_score(lane.scores, row_max)
        if cutlass.const_expr(self.plan.config.ctas == 2):
            top = cutlass.max(top, from_other_half(self.plan, lane, top, stage))
        row_max, shrink = next_max(top, row_max, scale_log2, self.plan.config.rescale_log2)
        if cutlass.const_expr(not self.corrects):
            tell(lane, turn, (shrink,))
        exponentiate(lane.scores, row_max, scale_log2)
        if cutlass.const_expr(self.corrects and self.plan.config.p_in_smem):
            lane.pipes.o.wait(turn)  # the P V before has read the one buffer of P
        store_p(self.plan, lane, stage)
        if cutlass.const_expr(self.corrects):
            if cutlass.const_expr(not self.plan.config.p_in_smem):
                lane.pipes.o.wait(turn)
            rescale_output(self.plan, lane, shrink)
        tmem.wait_stores()
        tmem.order_before_signal()
        lane.pipes.p.signal(stage)
        return row_max, row_sum * shrink + row_total(lane.scores)

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
