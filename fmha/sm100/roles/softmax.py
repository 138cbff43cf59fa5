"""Softmax role: four warps turn S into P, one query row per thread, no shuffles.

Per tile: read S, mask it in boundary tiles, exponentiate, write P over S, let `correction` rescale
O where the row maximum moved, signal. The row sum comes after the signal: the MMA warp has no use
for it. At the end `epilogue` stores the row.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fmha.plan import S_STAGES, AttentionPlan
from fmha.sm100.args import Buffers, Lane, Outputs, Pipes, Row, Work
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
        lane = Lane(
            self.own_row(work),
            cute.make_rmem_tensor(self.plan.config.tile_n, Float32),
            work.scale_log2,
            buffers,
            pipes,
        )
        if cutlass.const_expr(self.plan.config.kv_lens):
            clear_tail_rows(self.plan, work, lane)
        s_state = draining(S_STAGES)
        o_state = filling(1)  # O is taken for rescaling like a buffer that starts out free
        row_max, row_sum = -Float32.inf, Float32(0.0)
        for step in cutlass.range(work.masked_tiles, unroll=1):
            first_key = (work.kv_tiles - 1 - step) * self.plan.config.tile_n
            columns = lane.row.visible - first_key
            row_max, row_sum = self.do_tile(lane, (row_max, row_sum), (s_state, o_state), columns)
            s_state.advance()
            o_state.advance()
        for _ in cutlass.range(work.kv_tiles - work.masked_tiles, unroll=1):
            row_max, row_sum = self.do_tile(lane, (row_max, row_sum), (s_state, o_state), None)
            s_state.advance()
            o_state.advance()
        if work.kv_tiles > 0:
            pipes.o.wait(o_state)
        store_results(self.plan, work, lane, (row_max, row_sum), outputs)

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
    def do_tile(self, lane: Lane, statistics: tuple, states: tuple, columns: Int32 | None) -> tuple:
        """One tile from S to a published P; returns (row_max, row_sum).

        states: (S, O), read only. columns: how many of this tile the row sees, None for all.
        """
        row_max, row_sum = statistics
        s_state, o_state = states
        lane.pipes.s.wait(s_state)
        self.read_scores(lane, s_state.index)
        if cutlass.const_expr(columns is not None):
            keep_columns(lane.scores, columns)
        slack = self.plan.config.rescale_log2
        row_max, shrink = next_max(lane.scores, row_max, lane.scale_log2, slack)
        exponentiate(lane.scores, row_max, lane.scale_log2)
        self.store_p(lane, s_state.index)
        lane.pipes.o.wait(o_state)
        rescale_output(self.plan, lane, shrink)
        tmem.wait_stores()
        tmem.order_before_signal()
        lane.pipes.p.signal(s_state.index)
        return row_max, row_sum * shrink + row_total(lane.scores)

    @cute.jit
    def read_scores(self, lane: Lane, stage: Int32) -> None:
        """This thread's row of S[stage] into its registers."""
        tmem.order_after_wait()
        columns = self.plan.tmem["S0"].columns
        begin = self.plan.tmem["S0"].begin + stage * columns
        for chunk in cutlass.range_constexpr(columns // CHUNK):
            tile = tmem.tile_at(lane.buffers.tmem, begin + chunk * CHUNK, CHUNK)
            tmem.load_row(tile, chunk_of(lane.scores, chunk), lane.row.thread)
        tmem.wait_loads()

    @cute.jit
    def store_p(self, lane: Lane, stage: Int32) -> None:
        """Round the weights and start their store over the tail of S[stage], two per column."""
        io = IO_TYPES[self.plan.config.dtype]
        width = CHUNK * io.width // Float32.width
        first, second = self.plan.tmem["P0"], self.plan.tmem["P1"]
        begin = first.begin + stage * (second.begin - first.begin)
        for chunk in cutlass.range_constexpr(first.columns // width):
            packed = cute.make_rmem_tensor(width, Float32)
            rounded = cute.recast_tensor(packed, io)
            rounded.store(chunk_of(lane.scores, chunk).load().to(io))
            tile = tmem.tile_at(lane.buffers.tmem, begin + chunk * width, width)
            tmem.store_row(packed, tile, lane.row.thread)


@cute.jit
def chunk_of(row: cute.Tensor, chunk: cutlass.Constexpr) -> cute.Tensor:
    """Columns [CHUNK * chunk, CHUNK * (chunk + 1)) of a register row."""
    return cute.make_tensor(row.iterator + chunk * CHUNK, cute.make_layout(CHUNK))
