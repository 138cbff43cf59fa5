"""MMA role: one warp issues S = Q K^T two tiles ahead of O += P V.

P lies over S, so the S buffer of tile i + 2 is free when P V of tile i has been issued: the tensor
core executes the MMAs of one thread in order. That one wait per tile, for P, therefore also says
that the softmax has read S, and that it has rescaled O.
"""

import cutlass
import cutlass.cute as cute

from fmha.plan import S_STAGES, AttentionPlan
from fmha.sm100.args import Buffers, Pipes, Work
from fmha.sm100.products import (
    accumulator,
    issue,
    make_pv_mma,
    make_qk_mma,
    p_operand,
    pv_tile,
    qk_tile,
)
from kernelkit import tmem
from kernelkit.pipelines import draining


class Mma:
    """Owns the tensor core."""

    def __init__(self, plan: AttentionPlan) -> None:
        self.plan = plan
        self.role = plan.roles["mma"]

    @cute.jit
    def run(self, work: Work, buffers: Buffers, pipes: Pipes) -> None:
        """Whole life of the warp: step t issues P V of tile t - 2 and Q K^T of tile t."""
        stages = self.plan.config.kv_stages
        k_state, v_state = draining(stages), draining(stages)
        s_state, p_state = draining(S_STAGES), draining(S_STAGES)
        if work.kv_tiles > 0:
            pipes.q.wait(draining(1))
        for step in cutlass.range(work.kv_tiles + S_STAGES, unroll=1):
            if step >= S_STAGES:
                pipes.p.wait(p_state)
                pipes.v.wait(v_state)
                tmem.order_after_wait()
                self.add_pv(buffers, p_state.index, v_state.index, step > S_STAGES)
                pipes.v.release(v_state.index)
                pipes.o.signal(0)
                p_state.advance()
                v_state.advance()
            if step < work.kv_tiles:
                pipes.k.wait(k_state)
                self.make_s(buffers, s_state.index, k_state.index)
                pipes.k.release(k_state.index)
                pipes.s.signal(s_state.index)
                s_state.advance()
                k_state.advance()

    @cute.jit
    def make_s(self, buffers: Buffers, s_stage: cutlass.Int32, k_stage: cutlass.Int32) -> None:
        """S[s_stage] = Q K[k_stage]^T."""
        mma = make_qk_mma(self.plan)
        column = self.plan.tmem["S0"].begin + s_stage * self.plan.tmem["S0"].columns
        tS = accumulator(mma, qk_tile(self.plan), buffers.tmem, column)
        tSrQ = mma.make_fragment_A(buffers.q)[None, None, None, 0]
        tSrK = mma.make_fragment_B(buffers.k)[None, None, None, k_stage]
        issue(mma, tS, tSrQ, tSrK, False)

    @cute.jit
    def add_pv(
        self,
        buffers: Buffers,
        p_stage: cutlass.Int32,
        v_stage: cutlass.Int32,
        accumulate: cutlass.Boolean,
    ) -> None:
        """O (+)= P[p_stage] V[v_stage]; the first tile overwrites what the columns held."""
        mma = make_pv_mma(self.plan)
        tO = accumulator(mma, pv_tile(self.plan), buffers.tmem, self.plan.tmem["O"].begin)
        tOrP = p_operand(self.plan, mma, buffers.tmem)[None, None, None, p_stage]
        tOrV = mma.make_fragment_B(buffers.v)[None, None, None, v_stage]
        issue(mma, tO, tOrP, tOrV, accumulate)
