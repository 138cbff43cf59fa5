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
from cutlass import Boolean

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
from kernelkit.pipelines import draining
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
        k_state, v_state = draining(k_stages), draining(v_stages)
        s_state, p_state = draining(layout.lead), draining(layout.lead)
        if walk.tiles > 0:
            for q_tile in cutlass.range_constexpr(q_tiles):
                pipes.q.wait(draining(1), q_tile)
        for step in cutlass.range(walk.tiles + layout.lead, unroll=1):
            for q_tile in cutlass.range_constexpr(q_tiles):
                if step >= layout.lead:
                    pipes.p.wait(p_state, q_tile)
                    if cutlass.const_expr(pipes.rescaled is not None):
                        pipes.rescaled.wait(p_state, q_tile)
                    tmem.order_after_wait()
                    for piece in cutlass.range_constexpr(layout.v_pieces):
                        pipes.v.wait(v_state)
                        stages = (p_state.index + q_tile, v_state.index)
                        self.add_pv(scope, (piece, q_tile), stages, step > layout.lead)
                        if cutlass.const_expr(q_tile == q_tiles - 1):
                            pipes.v.release(v_state.index)
                            v_state.advance()
                    pipes.o.signal(q_tile)
                    if cutlass.const_expr(q_tile == q_tiles - 1):
                        p_state.advance()
                if step < walk.tiles:
                    for piece in cutlass.range_constexpr(layout.k_pieces):
                        pipes.k.wait(k_state)
                        stages = (s_state.index + q_tile, k_state.index)
                        self.add_qk(scope, (piece, q_tile), stages)
                        if cutlass.const_expr(q_tile == q_tiles - 1):
                            pipes.k.release(k_state.index)
                            k_state.advance()
                    pipes.s.signal(s_state.index + q_tile)
                    if cutlass.const_expr(q_tile == q_tiles - 1):
                        s_state.advance()

    @cute.jit
    def add_qk(self, scope: Scope, part: cutlass.Constexpr, stages: tuple) -> None:
        """S[s] (+)= Q K^T over one slice of the head dim.

        part: (K piece, query tile); stages: (S, K ring).
        """
        (piece, q_tile), (s_stage, k_stage) = part, stages
        mma = make_qk_mma(self.plan)
        first = self.plan.tmem["S0"]
        column = first.begin + s_stage * first.columns
        tS = accumulator(mma, qk_tile(self.plan), scope.buffers.tmem, column)
        tSrK = k_operand(self.plan, mma, scope.buffers.k)[None, None, None, k_stage]
        q_piece = q_tile * self.plan.layout.k_pieces + piece
        tSrQ = q_operand(self.plan, mma, scope.buffers.q)[None, None, None, q_piece]
        issue(mma, tS, tSrQ, tSrK, Boolean(piece > 0))

    @cute.jit
    def add_pv(
        self, scope: Scope, part: cutlass.Constexpr, stages: tuple, accumulate: Boolean
    ) -> None:
        """A piece of O (+)= P V. The first tile overwrites the columns.

        part: (V piece, query tile); stages: (P, V ring).
        """
        (piece, q_tile), (p_stage, v_stage) = part, stages
        mma = make_pv_mma(self.plan)
        column = self.plan.tmem[f"O{q_tile}"].begin + piece * self.plan.layout.v_columns
        tO = accumulator(mma, pv_tile(self.plan), scope.buffers.tmem, column)
        tOrP = p_operand(self.plan, mma, scope.buffers.p, scope.buffers.tmem)
        tOrV = v_operand(self.plan, mma, scope.buffers.v)[None, None, None, v_stage]
        issue(mma, tO, tOrP[None, None, None, p_stage], tOrV, accumulate)
