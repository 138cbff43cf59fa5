"""The two matrix products: tiled MMAs, shared-memory layouts, TMEM operands (device code).

S = Q K^T reads both operands from shared memory; O += P V reads P from TMEM. V is stored
[key, d] with d contiguous, so as the B operand (N = d, K = key) it is MN-major.
A TiledMma is built anew wherever it is used: passed through a loop it stops being a constant.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.utils import blackwell_helpers as sm100

from fmha.plan import S_STAGES, AttentionPlan

IO_TYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}
OUT_TYPES = IO_TYPES | {"fp32": Float32}


def qk_tile(plan: AttentionPlan) -> tuple[int, int, int]:
    """(M, N, K) of S = Q K^T."""
    config = plan.config
    return config.tile_m, config.tile_n, config.head_dim


def pv_tile(plan: AttentionPlan) -> tuple[int, int, int]:
    """(M, N, K) of O += P V."""
    config = plan.config
    return config.tile_m, config.head_dim, config.tile_n


def make_qk_mma(plan: AttentionPlan) -> cute.TiledMma:
    """Q and K K-major from shared memory."""
    io = IO_TYPES[plan.config.dtype]
    major = (OperandMajorMode.K, OperandMajorMode.K)
    return sm100.make_trivial_tiled_mma(
        io, io, *major, Float32, tcgen05.CtaGroup.ONE, qk_tile(plan)[:2]
    )


def make_pv_mma(plan: AttentionPlan) -> cute.TiledMma:
    """P from TMEM, V MN-major from shared memory."""
    io = IO_TYPES[plan.config.dtype]
    major = (OperandMajorMode.K, OperandMajorMode.MN)
    source = tcgen05.OperandSource.TMEM
    return sm100.make_trivial_tiled_mma(
        io, io, *major, Float32, tcgen05.CtaGroup.ONE, pv_tile(plan)[:2], source
    )


def smem_layouts(plan: AttentionPlan) -> tuple:
    """Swizzled layouts of sQ, sK and sV, (MMA, rest, rest, stage)."""
    io, stages = IO_TYPES[plan.config.dtype], plan.config.kv_stages
    qk_mma, pv_mma = make_qk_mma(plan), make_pv_mma(plan)
    return (
        sm100.make_smem_layout_a(qk_mma, qk_tile(plan), io, 1),
        sm100.make_smem_layout_b(qk_mma, qk_tile(plan), io, stages),
        sm100.make_smem_layout_b(pv_mma, pv_tile(plan), io, stages),
    )


def accumulator(
    mma: cute.TiledMma, tile: tuple[int, int, int], base: cute.Pointer, column: Int32
) -> cute.Tensor:
    """The fp32 accumulator (MMA, 1, 1) of `tile` that starts at TMEM column `column`."""
    fragment = mma.make_fragment_C(mma.partition_shape_C(tile[:2]))
    return cute.make_tensor(base + column, fragment.layout)


def p_operand(plan: AttentionPlan, mma: cute.TiledMma, base: cute.Pointer) -> cute.Tensor:
    """P in TMEM as the A operand, (MMA, 1, tile_n / 16, S stage)."""
    io = IO_TYPES[plan.config.dtype]
    layout = sm100.make_smem_layout_a(mma, pv_tile(plan), io, 1)
    one = mma.make_fragment_A(cute.make_tensor(base, layout.outer))[None, None, None, 0]
    stage_columns = plan.tmem["P1"].begin - plan.tmem["P0"].begin
    stages = cute.make_layout(S_STAGES, stride=stage_columns * Float32.width // io.width)
    pointer = cute.recast_ptr(base + plan.tmem["P0"].begin, dtype=io)
    return cute.make_tensor(pointer, cute.append(one.layout, stages))


@cute.jit
def issue(
    mma: cute.TiledMma, d: cute.Tensor, a: cute.Tensor, b: cute.Tensor, accumulate: Boolean
) -> None:
    """Issue D = A B, or D += A B, k block by k block; a commit announces the end of it."""
    for k_block in cutlass.range_constexpr(cute.size(a, mode=[2])):
        mma.set(tcgen05.Field.ACCUMULATE, accumulate if k_block == 0 else True)
        cute.gemm(mma, d, a[None, None, k_block], b[None, None, k_block], d)
