"""The two matrix products: tiled MMAs, their operands in shared memory and TMEM (device code).

S = Q K^T reads both operands from shared memory; O += P V reads P from TMEM or from shared memory.
V is stored [key, d] with d contiguous, so as the B operand (N = d, K = key) it is MN-major.
A TiledMma is built anew wherever it is used: passed through a loop it stops being a constant.
"""

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.utils import blackwell_helpers as sm100

from fmha.shared.args import IO_TYPES
from fmha.sm100.plan import Plan
from kernelkit.device.pipelines import cta_group
from kernelkit.device.umma import shared


def qk_tile(plan: Plan) -> tuple[int, int, int]:
    """(M, N, K) of S = Q K^T over one piece of K, for both CTAs of a pair."""
    return plan.layout.mma_rows, plan.layout.tile_n, plan.layout.k_columns


def pv_tile(plan: Plan) -> tuple[int, int, int]:
    """(M, N, K) of one piece of O += P V."""
    return plan.layout.mma_rows, plan.layout.o_tile, plan.layout.tile_n


def make_qk_mma(plan: Plan) -> cute.TiledMma:
    """Make the MMA of Q K^T: Q and K K-major from shared memory."""
    io = IO_TYPES[plan.config.keys_dtype]
    major = (OperandMajorMode.K, OperandMajorMode.K)
    return sm100.make_trivial_tiled_mma(
        io, io, *major, Float32, cta_group(plan.edges), qk_tile(plan)[:2]
    )


def make_pv_mma(plan: Plan) -> cute.TiledMma:
    """Make the MMA of P V: P from TMEM or shared memory, V MN-major from shared memory."""
    io = IO_TYPES[plan.config.keys_dtype]
    major = (OperandMajorMode.K, OperandMajorMode.MN)
    in_smem = plan.layout.p_in_smem
    source = tcgen05.OperandSource.SMEM if in_smem else tcgen05.OperandSource.TMEM
    return sm100.make_trivial_tiled_mma(
        io, io, *major, Float32, cta_group(plan.edges), pv_tile(plan)[:2], source
    )


def q_operand(plan: Plan, mma: cute.TiledMma, pointer: cute.Pointer) -> cute.Tensor:
    """Return Q as the A operand, (MMA, 1, k_columns / mma_k, piece).

    Its panels are ordered by query tile, then term, then piece.
    """
    io, pieces = IO_TYPES[plan.config.keys_dtype], plan.layout.q_tiles * plan.layout.k_pieces
    layout = sm100.make_smem_layout_a(mma, qk_tile(plan), io, pieces * plan.config.q_terms)
    if plan.config.q_terms > 1:
        pointer = cute.recast_ptr(pointer, dtype=io)
    return mma.make_fragment_A(shared(pointer, layout))


def k_operand(plan: Plan, mma: cute.TiledMma, pointer: cute.Pointer) -> cute.Tensor:
    """The K ring as the B operand, (MMA, 1, k_columns / mma_k, stage)."""
    io = IO_TYPES[plan.config.keys_dtype]
    layout = sm100.make_smem_layout_b(mma, qk_tile(plan), io, plan.layout.stages[0])
    return mma.make_fragment_B(shared(pointer, layout))


def v_operand(plan: Plan, mma: cute.TiledMma, pointer: cute.Pointer) -> cute.Tensor:
    """The V ring as the B operand, (MMA, 1, tile_n / mma_k, stage)."""
    io = IO_TYPES[plan.config.keys_dtype]
    layout = sm100.make_smem_layout_b(mma, pv_tile(plan), io, plan.layout.stages[1])
    return mma.make_fragment_B(shared(pointer, layout))


def p_operand(
    plan: Plan, mma: cute.TiledMma, pointer: cute.Pointer, tmem: cute.Pointer
) -> cute.Tensor:
    """Return P as the A operand, (MMA, 1, tile_n / mma_k, buffer).

    There is one buffer per S buffer, or in shared memory one per query tile.
    """
    io = IO_TYPES[plan.config.keys_dtype]
    layout = sm100.make_smem_layout_a(mma, pv_tile(plan), io, plan.layout.q_tiles)
    if plan.layout.p_in_smem:
        return mma.make_fragment_A(shared(pointer, layout))
    one = mma.make_fragment_A(cute.make_tensor(tmem, layout.outer))[None, None, None, 0]
    stage_columns = plan.tmem["P1"].begin - plan.tmem["P0"].begin
    stages = cute.make_layout(
        plan.layout.s_stages, stride=stage_columns * Float32.width // io.width
    )
    pointer = cute.recast_ptr(tmem + plan.tmem["P0"].begin, dtype=io)
    return cute.make_tensor(pointer, cute.append(one.layout, stages))
