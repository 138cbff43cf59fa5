"""MMA role: one warp copies the scale factors of a tile to tensor memory and issues its MMAs.

The tensor core executes both in the order of issue, so the scale factors of all tiles can use the
same place in tensor memory.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float4E2M1FN, Float8E8M0FNU, Int32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.pipeline import PipelineState
from cutlass.utils import blackwell_helpers as sm100

from kernelkit.device import tmem
from kernelkit.device.pipelines import consumer_state, cta_group, producer_state
from kernelkit.device.umma import accumulator, copy_atom, shared
from mla.indexer.formats import WIDTH
from mla.indexer.scores_config import KEYS
from mla.indexer.scores_device import run_from
from mla.indexer.shared.args import Scope, tiles_of
from mla.indexer.shared.plan import SCALE_BYTES
from mla.indexer.sm100.plan import (
    ACC_STAGES,
    ATOM_BYTES,
    K_BLOCKS,
    ROLES,
    SCALES_OF_BLOCK,
    STAGES,
    ScoresPlan,
)

GROUP = WIDTH // SCALE_BYTES  # elements that share a scale factor


class Mma:
    """Device code that issues the MMAs."""

    def __init__(self, plan: ScoresPlan) -> None:
        self.plan = plan
        self.role = ROLES["mma"]

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Run the role."""
        plan, pipes, share = self.plan, scope.pipes, scope.share
        state, acc = consumer_state(STAGES), producer_state(ACC_STAGES)
        pipes.q.wait(consumer_state(1))
        self.bring_scales(scope, "q_scales", scope.buffers.q_scales)
        begin = Int32(0)
        while begin < plan.config.tokens:
            run = run_from(scope.buffers.spans, begin)
            begin = run.end
            for _ in cutlass.range(share.cta, tiles_of(run), share.ctas, unroll=1):
                pipes.acc.wait_free(acc)
                pipes.keys.wait(state)
                pipes.scales.wait(state)
                tmem.order_after_wait()
                self.multiply(scope, state, acc.index)
                pipes.keys.release(state.index)
                pipes.scales.release(state.index)
                pipes.acc.signal(acc.index)
                state.advance()
                acc.advance()

    @cute.jit
    def multiply(self, scope: Scope, state: PipelineState, stage: Int32) -> None:
        """Issue D = K Q^T of a tile.

        stage: stage of the accumulators.
        """
        plan, buffers = self.plan, scope.buffers
        words = buffers.key_scales + state.index * (ATOM_BYTES // SCALE_BYTES)
        self.bring_scales(scope, "key_scales", words)
        mma, tile = make_mma(plan), (KEYS, plan.n, WIDTH)
        # -> (MMA, MMA_M, MMA_N)
        d = accumulator(mma, tile, buffers.tmem, stage * plan.n)
        # -> (MMA, MMA_M, MMA_K)
        layout = sm100.make_smem_layout_a(mma, tile, buffers.keys.value_type, STAGES)
        a = mma.make_fragment_A(shared(buffers.keys, layout))[None, None, None, state.index]
        # -> (MMA, MMA_N, MMA_K)
        layout = sm100.make_smem_layout_b(mma, tile, buffers.q.value_type, 1)
        b = mma.make_fragment_B(shared(buffers.q, layout))[None, None, None, 0]
        for block in cutlass.range_constexpr(K_BLOCKS):
            mma.set(tcgen05.Field.ACCUMULATE, block > 0)
            mma.set(tcgen05.Field.SFA, self.scales(scope, "key_scales", block))
            mma.set(tcgen05.Field.SFB, self.scales(scope, "q_scales", block))
            cute.gemm(mma, d, a[None, None, block], b[None, None, block], d)

    @cute.jit
    def bring_scales(self, scope: Scope, name: str, words: cute.Pointer) -> None:
        """Copy an atom from shared memory to tensor memory."""
        column = scope.buffers.tmem + self.plan.tmem[name].begin
        copy_atom(cta_group(self.plan.edges), column, words)

    @cute.jit
    def scales(self, scope: Scope, name: str, block: cutlass.Constexpr) -> cute.Pointer:
        """Return the tensor memory address of the first scale factor of an MMA."""
        column = scope.buffers.tmem + self.plan.tmem[name].begin
        return cute.recast_ptr(column, dtype=Float8E8M0FNU) + block * SCALES_OF_BLOCK


def make_mma(plan: ScoresPlan) -> cute.TiledMma:
    """Build the tiled MMA.

    Each user builds it anew, because it stops being a constant when a loop carries it.
    """
    return sm100.make_blockscaled_trivial_tiled_mma(
        Float4E2M1FN,
        Float4E2M1FN,
        OperandMajorMode.K,
        OperandMajorMode.K,
        Float8E8M0FNU,
        GROUP,
        cta_group(plan.edges),
        (KEYS, plan.n),
    )
