"""MMA role: one warp issues S = Q K^T `lead` tiles ahead of O += P V.

Step t of the walk issues P V of tile t - lead and Q K^T of tile t, piece by piece, for every query
tile. There are two S buffers in all, so lead is 2, or 1 for each of two query tiles. P V waits for
P, which also says that the softmax has read S of that tile into registers, so its buffer is free
for tile t, and for O to be rescaled: P says so, or the edge `rescaled` where others correct O. The
tensor core executes the MMAs of one thread in order: P in TMEM, which lies over that S, has been
read when it is overwritten. In a CTA pair the leader issues for both.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from fmha.plan import AttentionPlan
from fmha.sm100.args import Scope, Walk
from fmha.sm100.products import (
    k_operand,
    make_pv_mma,
    make_qk_mma,
    p_operand,
    pv_tile,
    q_operand,
    qk_tile,
    v_operand,
)
from kernelkit import tmem
from kernelkit.pipelines import consumer_state
from kernelkit.umma import accumulator, issue


class Mma:
    """Owns the tensor core."""

    def __init__(self, plan: AttentionPlan) -> None:
        self.plan = plan
        self.role = plan.roles["mma"]

    @cute.jit
    def run(self, walk: Walk, scope: Scope) -> None:
        """Whole life of the warp."""
        pipes, layout, q_tiles = scope.pipes, self.plan.layout, self.plan.config.q_tiles
        k_stages, v_stages = layout.stages
        k_state, v_state = consumer_state(k_stages), consumer_state(v_stages)
        s_state, p_state = consumer_state(layout.lead), consumer_state(layout.lead)
        if walk.tiles > 0:
            for q_tile in cutlass.range_constexpr(q_tiles):
                pipes.q.wait(consumer_state(1), q_tile)
        for step in cutlass.range(walk.tiles + layout.lead, unroll=1):
            for q_tile in cutlass.range_constexpr(q_tiles):
                if step >= layout.lead:
                    pipes.p.wait(p_state, q_tile)
                    if cutlass.const_expr(pipes.rescaled is not None):
                        pipes.rescaled.wait(p_state, q_tile)
                    tmem.order_after_wait()
                    for piece in cutlass.range_constexpr(layout.v_pieces):
                        pipes.v.wait(v_state)
                        p_stage, accumulate = p_state.index + q_tile, step > layout.lead
                        self.add_pv(scope, piece, q_tile, p_stage, v_state.index, accumulate)
                        if cutlass.const_expr(q_tile == q_tiles - 1):
                            pipes.v.release(v_state.index)
                            v_state.advance()
                    pipes.o.signal(q_tile)
                    if cutlass.const_expr(q_tile == q_tiles - 1):
                        p_state.advance()
                if step < walk.tiles:
                    for piece in cutlass.range_constexpr(layout.k_pieces):
                        pipes.k.wait(k_state)
                        s_stage = s_state.index + q_tile
                        self.add_qk(scope, piece, q_tile, s_stage, k_state.index)
                        if cutlass.const_expr(q_tile == q_tiles - 1):
                            pipes.k.release(k_state.index)
                            k_state.advance()
                    pipes.s.signal(s_state.index + q_tile)
                    if cutlass.const_expr(q_tile == q_tiles - 1):
                        s_state.advance()

    @cute.jit
    def add_qk(
        self,
        scope: Scope,
        piece: cutlass.Constexpr,
        q_tile: cutlass.Constexpr,
        s_stage: Int32,
        k_stage: Int32,
    ) -> None:
        """S[s_stage] (+)= Q K^T over piece `piece` of K, a slice of the head dim."""
        mma = make_qk_mma(self.plan)
        first = self.plan.tmem["S0"]
        column = first.begin + s_stage * first.columns
        # -> (MMA, MMA_M, MMA_N)
        tS = accumulator(mma, qk_tile(self.plan), scope.buffers.tmem, column)
        # -> (MMA, MMA_N, MMA_K)
        tSrK = k_operand(self.plan, mma, scope.buffers.k)[None, None, None, k_stage]
        q_piece = q_tile * self.plan.layout.k_pieces + piece
        # -> (MMA, MMA_M, MMA_K)
        tSrQ = q_operand(self.plan, mma, scope.buffers.q)[None, None, None, q_piece]
        issue(mma, tS, tSrQ, tSrK, Boolean(piece > 0))

    @cute.jit
    def add_pv(
        self,
        scope: Scope,
        piece: cutlass.Constexpr,
        q_tile: cutlass.Constexpr,
        p_stage: Int32,
        v_stage: Int32,
        accumulate: Boolean,
    ) -> None:
        """O (+)= P V over piece `piece` of V, a slice of its columns. The first tile overwrites."""
        mma = make_pv_mma(self.plan)
        column = self.plan.tmem[f"O{q_tile}"].begin + piece * self.plan.layout.v_columns
        # -> (MMA, MMA_M, MMA_N)
        tO = accumulator(mma, pv_tile(self.plan), scope.buffers.tmem, column)
        # -> (MMA, MMA_M, MMA_K, stage)
        tOrP = p_operand(self.plan, mma, scope.buffers.p, scope.buffers.tmem)
        # -> (MMA, MMA_N, MMA_K)
        tOrV = v_operand(self.plan, mma, scope.buffers.v)[None, None, None, v_stage]
        issue(mma, tO, tOrP[None, None, None, p_stage], tOrV, accumulate)
