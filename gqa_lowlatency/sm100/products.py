"""The two products with swapped operands: tiled MMAs and their operands (device code).

S (128 x N) = K Q^T, a piece of the head at a time, both operands K-major. O^T (rows x N) += V^T P:
V is stored [key, d] with d contiguous, so as the A operand (M = d, K = key) it is MN-major; P is
stored [column, key], K-major. All operands lie in shared memory. A TiledMma is built anew wherever
it is used: passed through a loop it stops being a constant.
"""

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.utils import blackwell_helpers as sm100

from gqa_lowlatency.shared.signature import TYPES
from gqa_lowlatency.sm100.plan import TILE, Plan100
from kernelkit.device.umma import shared


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
