"""MMA role: one warp issues S = Q K^T, and O += P V two products behind it.

All products of all query blocks are one sequence: tile by tile, and for each tile one query tile
after the other. Number n of Q K^T goes with number n - 2 of P V, across the end of a block, so the
tensor core has work while a block ends. Q K^T overwrites the oldest S buffer. With three S buffers
the oldest is free and Q K^T comes first. With two it holds P, so P V comes first: the tensor core
executes the MMAs of one thread in order.

P V waits for its inputs in the order in which they are ready: V; O, which the correction has
rescaled or read; P, which also signals that the softmax has read its S. In a CTA pair the leader
issues for both.

If the softmax splits Q into terms, it does so after its last P of the previous block. Then the last
products P V of a block are issued before the next block's first Q K^T. The other order could
deadlock: the last P V would wait for the terms, the correction for P V, and the softmax, if a block
without keys lies in between, for the correction.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.pipeline import PipelineState

from fmha.shared.args import Pipes, Scope
from fmha.shared.walk import count_rounds, locate, plan_walk
from fmha.sm100.plan import Plan
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
from kernelkit.device import tmem
from kernelkit.device.pipelines import Event, consumer_state, producer_state
from kernelkit.device.umma import accumulator, issue

# State of earlier steps for their P V: a shift register, two bits a step, the latest lowest.
# Bit 1: Q K^T was issued. Bit 0: P V is added to O; 0 overwrites O.
STEP_BITS, ISSUED = 2, 2


def was_issued(earlier: Int32, lag: int) -> Boolean:
    """Return whether Q K^T was issued `lag` steps ago."""
    return earlier >> (STEP_BITS * lag - 1) & 1 == 1


def adds_to_o(earlier: Int32, lag: int) -> Boolean:
    """Return whether P V of the step `lag` steps ago is added to O."""
    return Boolean(earlier >> (STEP_BITS * lag - 2) & 1)


class Mma:
    """Role that issues all MMAs."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.role = plan.roles["mma"]

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warp. After the last block, extra steps add the remaining P V."""
        pipes, layout, q_tiles = scope.pipes, self.plan.layout, self.plan.layout.q_tiles
        k_stages, v_stages = layout.stages
        k_state, v_state, q_state = (consumer_state(n) for n in (k_stages, v_stages, 1))
        s_state, p_state = consumer_state(layout.s_stages), consumer_state(layout.s_stages)
        # If V rows are cleared, the correction signals it before the first P V of a block.
        o_state = consumer_state(1) if self.plan.config.ragged_keys else producer_state(1)
        earlier = Int32(0)
        rounds = count_rounds(self.plan, scope.tensors.order)
        for turn in cutlass.range(rounds + 1, unroll=1):
            steps = Int32(layout.lag)
            if turn < rounds:
                work = locate(self.plan, scope.tensors, turn)
                steps = plan_walk(self.plan, work, scope.scalars).tiles
            tiles, multiplies = steps, turn < rounds
            if cutlass.const_expr(self.plan.config.q_terms > 1):
                if multiplies and tiles > 0:
                    steps += layout.lag
            for step in cutlass.range(steps, unroll=1):
                if cutlass.const_expr(self.plan.config.q_terms > 1):
                    multiplies = turn < rounds and step < tiles
                for half in cutlass.range_constexpr(2 * q_tiles):
                    q_tile = half // 2
                    if cutlass.const_expr(half % 2 == (layout.s_stages == 2)):
                        if multiplies:
                            if step == 0:
                                own_q(pipes).wait(q_state, q_tile)
                            # Not unrolled: ptxas would keep each address in Q in registers.
                            for piece in cutlass.range(layout.k_pieces, unroll=1):
                                pipes.k.wait(k_state)
                                self.add_qk(scope, piece, q_tile, s_state.index, k_state.index)
                                if cutlass.const_expr(q_tile == q_tiles - 1):
                                    pipes.k.release(k_state.index)
                                    k_state.advance()
                            pipes.s.signal(s_state.index)
                            s_state.advance()
                            if step == tiles - 1:
                                pipes.q.release(q_tile)
                    elif was_issued(earlier, layout.lag):
                        adds = adds_to_o(earlier, layout.lag)
                        for piece in cutlass.range_constexpr(layout.v_pieces):
                            pipes.v.wait(v_state)
                            if cutlass.const_expr(piece == 0):
                                pipes.o.wait_free(o_state, q_tile)
                                pipes.p.wait(p_state)
                                tmem.order_after_wait()
                            self.add_pv(scope, piece, q_tile, p_state, v_state.index, adds)
                            if cutlass.const_expr(q_tile == q_tiles - 1):
                                pipes.v.release(v_state.index)
                                v_state.advance()
                        pipes.o.signal(q_tile)
                        p_state.advance()
                        if cutlass.const_expr(q_tile == q_tiles - 1):
                            o_state.advance()
                earlier = earlier << STEP_BITS
                if multiplies:
                    earlier = earlier | ISSUED | Int32(step > 0)
            if turn < rounds and steps > 0:
                q_state.advance()

    @cute.jit
    def add_qk(
        self,
        scope: Scope,
        piece: Int32,
        q_tile: cutlass.Constexpr,
        s_stage: Int32,
        k_stage: Int32,
    ) -> None:
        """Issue S[s_stage] (+)= Q K^T over piece `piece` of K, a slice of the head dim."""
        mma = make_qk_mma(self.plan)
        first = self.plan.tmem["S0"]
        column = first.begin + s_stage * first.columns
        # -> (MMA, MMA_M, MMA_N)
        tS = accumulator(mma, qk_tile(self.plan), scope.buffers.tmem, column)
        # -> (MMA, MMA_N, MMA_K)
        tSrK = k_operand(self.plan, mma, scope.buffers.k)[None, None, None, k_stage]
        pieces, last = self.plan.layout.k_pieces, self.plan.config.q_terms - 1
        for term in cutlass.range_constexpr(last, -1, -1):  # the small one first
            q_piece = (q_tile * (last + 1) + term) * pieces + piece
            # -> (MMA, MMA_M, MMA_K)
            tSrQ = q_operand(self.plan, mma, scope.buffers.q)[None, None, None, q_piece]
            issue(mma, tS, tSrQ, tSrK, Boolean(True) if term < last else Boolean(piece > 0))

    @cute.jit
    def add_pv(
        self,
        scope: Scope,
        piece: cutlass.Constexpr,
        q_tile: cutlass.Constexpr,
        p_state: PipelineState,
        v_stage: Int32,
        accumulate: Boolean,
    ) -> None:
        """Issue O (+)= P V over piece `piece` of V, a slice of its columns.

        The first tile overwrites O. P may come in two parts; the state is read only.
        """
        mma = make_pv_mma(self.plan)
        column = self.plan.tmem[f"O{q_tile}"].begin + piece * self.plan.layout.o_columns
        # -> (MMA, MMA_M, MMA_N)
        tO = accumulator(mma, pv_tile(self.plan), scope.buffers.tmem, column)
        # -> (MMA, MMA_M, MMA_K, buffer)
        tOrP = p_operand(self.plan, mma, scope.buffers.p, scope.buffers.tmem)
        # -> (MMA, MMA_N, MMA_K)
        buffer = q_tile if self.plan.layout.p_in_smem else p_state.index
        tOrV = v_operand(self.plan, mma, scope.buffers.v)[None, None, None, v_stage]
        tOrP = tOrP[None, None, None, buffer]
        first, mma_k = self.plan.layout.p_columns[0], self.plan.layout.mma_k
        first = first // mma_k
        issue(mma, tO, tOrP, tOrV, accumulate, range(first))
        if cutlass.const_expr(scope.pipes.p_tail is not None):
            if cutlass.const_expr(piece == 0):
                scope.pipes.p_tail.wait(p_state)
                tmem.order_after_wait()
            issue(
                mma, tO, tOrP, tOrV, Boolean(True), range(first, self.plan.layout.tile_n // mma_k)
            )


def own_q(pipes: Pipes) -> Event:
    """Return the edge on which to wait for a query tile: Q from TMA, or its terms."""
    return pipes.q if pipes.terms is None else pipes.terms
