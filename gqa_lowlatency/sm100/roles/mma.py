"""MMA role: one warp issues S of a tile, then O^T of the tile before.

S has one buffer, which is free once the epilogue has taken S of the tile before into registers: so
the product runs under the softmax. O^T waits for P, which also says that O has been rescaled.

The products have swapped operands. S (128 x N) = K Q^T, a piece of the head at a time, both
operands K-major. O^T (rows x N) += V^T P: V is stored [key, d] with d contiguous, so as the A
operand (M = d, K = key) it is MN-major; P is stored [column, key], K-major. All operands lie in
shared memory. A TiledMma is built anew wherever it is used: passed through a loop it stops being a
constant.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.utils import blackwell_helpers as sm100

from gqa_lowlatency.shared.signature import TYPES
from gqa_lowlatency.sm100.args import Scope
from gqa_lowlatency.sm100.plan import ROLES, TILE, Plan100
from kernelkit.device import tmem
from kernelkit.device.pipelines import consumer_state, producer_state
from kernelkit.device.umma import accumulator, issue, shared


def s_tile(plan: Plan100) -> tuple[int, int, int]:
    """(M, N, K) of one piece of S = K Q^T."""
    return TILE, plan.columns, plan.piece_columns


def o_tile(plan: Plan100) -> tuple[int, int, int]:
    """(M, N, K) of one part of O^T += V^T P."""
    return plan.piece_columns, plan.columns, TILE


def make_s_mma(plan: Plan100) -> cute.TiledMma:
    """K and Q."""
    return _make(plan, OperandMajorMode.K, s_tile(plan))


def make_o_mma(plan: Plan100) -> cute.TiledMma:
    """V and P."""
    return _make(plan, OperandMajorMode.MN, o_tile(plan))


def _make(plan: Plan100, major: OperandMajorMode, tile: tuple[int, int, int]) -> cute.TiledMma:
    operand = TYPES[plan.config.keys_dtype]
    return sm100.make_trivial_tiled_mma(
        operand, operand, major, OperandMajorMode.K, Float32, tcgen05.CtaGroup.ONE, tile[:2]
    )


def keys_operand(
    plan: Plan100, mma: cute.TiledMma, tile: tuple[int, int, int], ring: cute.Pointer
) -> cute.Tensor:
    """The ring as the A operand of either product, (MMA, 1, K / 16, stage)."""
    layout = sm100.make_smem_layout_a(mma, tile, ring.value_type, plan.stages)
    return mma.make_fragment_A(shared(ring, layout))


def rows_operand(
    mma: cute.TiledMma, tile: tuple[int, int, int], pointer: cute.Pointer, count: int
) -> cute.Tensor:
    """Q or P as the B operand, (MMA, 1, K / 16, piece): panels stand in the order of pieces."""
    layout = sm100.make_smem_layout_b(mma, tile, pointer.value_type, count)
    return mma.make_fragment_B(shared(pointer, layout))


class Mma:
    """Owns the tensor core."""

    def __init__(self, plan: Plan100) -> None:
        self.plan = plan
        self.role = ROLES["mma"]

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warp."""
        plan, pipes, count = self.plan, scope.pipes, scope.share.count
        kv_state, p_state, taken_state = (
            consumer_state(plan.stages),
            consumer_state(1),
            producer_state(1),
        )
        if count > 0:
            pipes.q.wait(consumer_state(1))
        for step in cutlass.range(count + 1, unroll=1):
            if step < count:
                pipes.taken.wait(taken_state)
                taken_state.advance()
                tmem.order_after_wait()
                for piece in cutlass.range_constexpr(plan.pieces):
                    pipes.kv.wait(kv_state)
                    self.add_s(scope, piece, kv_state.index)
                    pipes.kv.release(kv_state.index)
                    kv_state.advance()
                pipes.s.signal(0)
            if step > 0:
                if cutlass.const_expr(not plan.in_turn):
                    # V first, which has usually arrived: even a satisfied wait costs time.
                    v_state = kv_state.clone()
                    for _ in cutlass.range_constexpr(plan.pieces):
                        pipes.kv.wait(v_state)
                        v_state.advance()
                pipes.p.wait(p_state)
                p_state.advance()
                tmem.order_after_wait()
                for piece in cutlass.range_constexpr(plan.pieces):
                    if cutlass.const_expr(plan.in_turn):
                        pipes.kv.wait(kv_state)
                    self.add_o(scope, piece, kv_state.index, step > 1)
                    pipes.kv.release(kv_state.index)
                    kv_state.advance()
                pipes.o.signal(0)

    @cute.jit
    def add_s(self, scope: Scope, piece: cutlass.Constexpr, stage: Int32) -> None:
        """S (+)= K Q^T over one piece of the head."""
        plan, buffers = self.plan, scope.buffers
        mma, tile = make_s_mma(plan), s_tile(plan)
        # -> (MMA, MMA_M, MMA_N)
        tS = accumulator(mma, tile, buffers.tmem, plan.tmem["S"].begin)
        # -> (MMA, MMA_M, MMA_K)
        tSrK = keys_operand(plan, mma, tile, buffers.ring)[None, None, None, stage]
        # -> (MMA, MMA_N, MMA_K)
        tSrQ = rows_operand(mma, tile, buffers.q, plan.pieces)[None, None, None, piece]
        issue(mma, tS, tSrK, tSrQ, Boolean(piece > 0))

    @cute.jit
    def add_o(
        self, scope: Scope, piece: cutlass.Constexpr, stage: Int32, accumulate: Boolean
    ) -> None:
        """A part of O^T (+)= V^T P. The first tile overwrites it."""
        plan, buffers = self.plan, scope.buffers
        mma, tile = make_o_mma(plan), o_tile(plan)
        # -> (MMA, MMA_M, MMA_N)
        tO = accumulator(mma, tile, buffers.tmem, plan.tmem[f"O{piece}"].begin)
        # -> (MMA, MMA_M, MMA_K)
        tOrV = keys_operand(plan, mma, tile, buffers.ring)[None, None, None, stage]
        # -> (MMA, MMA_N, MMA_K)
        tOrP = rows_operand(mma, tile, buffers.p, 1)[None, None, None, 0]
        issue(mma, tO, tOrV, tOrP, accumulate)
