"""Softmax role: four warps turn S into P, one query row per thread, no shuffles.

Per tile: read S, mask it in boundary tiles, exponentiate, write P over S, let `correction` rescale
O where the row maximum moved, signal. The row sum comes after the signal: the MMA warp has no use
for it. At the end `epilogue` stores the row.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fmha.plan import S_STAGES, AttentionPlan
from fmha.sm100.args import Buffers, Outputs, Pipes, Row, Work
from fmha.sm100.products import IO_TYPES
from fmha.sm100.roles.correction import clear_tail_rows, rescale_output
from fmha.sm100.roles.epilogue import store_results
from kernelkit import tmem
from kernelkit.online_softmax import (
    CHUNK,
    exponentiate,
    keep_columns,
    next_max,
    row_total,
)
from kernelkit.pipelines import draining, filling


class Softmax:
    """Turns S into P, keeps O consistent with the row maxima, stores the result."""

    def __init__(self, plan: AttentionPlan) -> None:
        self.plan = plan
        self.role = plan.roles["softmax"]

    @cute.jit
    def run(self, work: Work, buffers: Buffers, pipes: Pipes, outputs: Outputs) -> None:
        """Whole life of the warps. Boundary tiles come first, so two copies of the loop do."""
        row = self.own_row(work)
        if cutlass.const_expr(self.plan.config.kv_lens):
            clear_tail_rows(self.plan, work, buffers, pipes, row)
        s_state = draining(S_STAGES)
        o_state = filling(1)  # O is taken for rescaling like a buffer that starts out free
        row_max, row_sum = -Float32.inf, Float32(0.0)
        scores = cute.make_rmem_tensor(self.plan.config.tile_n, Float32)
        for step in cutlass.range(work.masked_tiles, unroll=1):
            pipes.s.wait(s_state)
            self.read_scores(buffers, s_state.index, row, scores)
            first_key = (work.kv_tiles - 1 - step) * self.plan.config.tile_n
            keep_columns(scores, row.visible - first_key)
            row_max, shrink = self.weigh(scores, row_max, work)
            self.store_p(scores, buffers, s_state.index, row)
            pipes.o.wait(o_state)
            rescale_output(self.plan, buffers, row, shrink)
            self.publish(pipes, s_state.index)
            row_sum = row_sum * shrink + row_total(scores)
            s_state.advance()
            o_state.advance()
        for _ in cutlass.range(work.kv_tiles - work.masked_tiles, unroll=1):
            pipes.s.wait(s_state)
            self.read_scores(buffers, s_state.index, row, scores)
            row_max, shrink = self.weigh(scores, row_max, work)
            self.store_p(scores, buffers, s_state.index, row)
            pipes.o.wait(o_state)
            rescale_output(self.plan, buffers, row, shrink)
            self.publish(pipes, s_state.index)
            row_sum = row_sum * shrink + row_total(scores)
            s_state.advance()
            o_state.advance()
        if work.kv_tiles > 0:
            pipes.o.wait(o_state)
        store_results(self.plan, (work, row, buffers), (row_max, row_sum), outputs)

    @cute.jit
    def own_row(self, work: Work) -> Row:
        """This thread's row and how many keys it sees; causal is aligned bottom-right."""
        thread, _, _ = cute.arch.thread_idx()
        position = work.q_tile * self.plan.config.tile_m + thread
        visible = work.kv_length
        if cutlass.const_expr(self.plan.config.mask == "causal"):
            visible = cutlass.min(visible, work.kv_length - work.q_length + position + 1)
        return Row(thread, position, visible)

    @cute.jit
    def read_scores(self, buffers: Buffers, stage: Int32, row: Row, scores: cute.Tensor) -> None:
        """This thread's row of S[stage] in registers, (tile_n,)."""
        tmem.order_after_wait()
        columns = self.plan.tmem["S0"].columns
        begin = self.plan.tmem["S0"].begin + stage * columns
        for chunk in cutlass.range_constexpr(columns // CHUNK):
            tile = tmem.tile_at(buffers.tmem, begin + chunk * CHUNK, CHUNK)
            part = cute.make_tensor(scores.iterator + chunk * CHUNK, cute.make_layout(CHUNK))
            tmem.load_row(tile, part, row.thread)
        tmem.wait_loads()

    @cute.jit
    def weigh(self, scores: cute.Tensor, row_max: Float32, work: Work) -> tuple:
        """Scores become weights in place; returns (row_max, shrink) after this tile."""
        slack = self.plan.config.rescale_log2
        row_max, shrink = next_max(scores, row_max, work.scale_log2, slack)
        exponentiate(scores, row_max, work.scale_log2)
        return row_max, shrink

    @cute.jit
    def store_p(self, weights: cute.Tensor, buffers: Buffers, stage: Int32, row: Row) -> None:
        """Round the weights and start their store over the tail of S[stage], two per column."""
        io = IO_TYPES[self.plan.config.dtype]
        packed_columns = CHUNK * io.width // Float32.width
        stride = self.plan.tmem["P1"].begin - self.plan.tmem["P0"].begin
        begin = self.plan.tmem["P0"].begin + stage * stride
        for chunk in cutlass.range_constexpr(cute.size(weights) // CHUNK):
            part = cute.make_tensor(weights.iterator + chunk * CHUNK, cute.make_layout(CHUNK))
            packed = cute.make_rmem_tensor(packed_columns, Float32)
            rounded = cute.recast_tensor(packed, io)
            rounded.store(part.load().to(io))
            tile = tmem.tile_at(buffers.tmem, begin + chunk * packed_columns, packed_columns)
            tmem.store_row(packed, tile, row.thread)

    @cute.jit
    def publish(self, pipes: Pipes, stage: Int32) -> None:
        """P[stage] and O are in TMEM as the MMA warp is to see them."""
        tmem.wait_stores()
        tmem.order_before_signal()
        pipes.p.signal(stage)
