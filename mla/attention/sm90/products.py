"""Products of a warpgroup, and their operands in shared memory (device code).

Element c + 2 h + 4 j of a thread's accumulator is column 8 j + 2 (lane % 4) + c. Its row is
lane / 4 + 8 h, of the sixteen of the warp. As the A operand of the next product the elements have
the same order. A tile of keys is K-major for S, and MN-major as V: N = columns, K = keys.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import hopper_helpers

from kernelkit.device.umma import shared
from mla.attention.shared.intake import HALF, PANEL, PANEL_BYTES, PANELS
from mla.attention.sm90.args import Buffers
from mla.attention.sm90.plan import BUFFER_BYTES, KEYS, ROWS, Plan90

K, MN = OperandMajorMode.K, OperandMajorMode.MN
STEPS = PANEL // 16  # k steps of a panel
_ATOMS = {
    K: warpgroup.SmemLayoutAtomKind.K_SW128,
    MN: warpgroup.SmemLayoutAtomKind.MN_SW128,
}


def number_type(plan: Plan90) -> type:
    """Return the type of Q, K, V and P in shared memory."""
    return Float16 if plan.halves else BFloat16


def qk_mma(plan: Plan90) -> cute.TiledMma:
    """Make the MMA of S: Q and K from shared memory."""
    return mma_of_scores(number_type(plan))


def mma_of_scores(kind: type) -> cute.TiledMma:
    """Make the MMA of S for numbers of a type."""
    return hopper_helpers.make_trivial_tiled_mma(kind, kind, K, K, Float32, (1, 1, 1), (ROWS, KEYS))


def pv_mma(plan: Plan90, from_smem: bool) -> cute.TiledMma:
    """Make the MMA of P V: P from registers or shared memory, some columns of V at a time."""
    source = warpgroup.OperandSource.SMEM if from_smem else warpgroup.OperandSource.RMEM
    kind = number_type(plan)
    return hopper_helpers.make_trivial_tiled_mma(
        kind, kind, K, MN, Float32, (1, 1, 1), (ROWS, plan.value_columns), source
    )


def lines(kind: type, rows: int, columns: int) -> cute.ComposedLayout:
    """Return the layout (rows, columns) of panels of swizzled lines."""
    atom = warpgroup.make_smem_layout_atom(_ATOMS[K], kind)
    return cute.tile_to_shape(atom, (rows, columns), (0, 1))


def operand(plan: Plan90, start: cute.Pointer, layout: cute.ComposedLayout) -> cute.Tensor:
    """Return a tensor of the plan's numbers in shared memory."""
    return shared(cute.recast_ptr(start, dtype=number_type(plan)), layout)


def buffer_start(k: cute.Pointer, buffer: int, panel: int = 0) -> cute.Pointer:
    """Return a panel of a buffer of keys."""
    return k + (buffer * BUFFER_BYTES + panel * PANEL_BYTES) // 2


def q_operand(plan: Plan90, q: cute.Pointer) -> cute.Tensor:
    """Return Q as the A operand, (MMA, 1, columns / 16)."""
    mma = qk_mma(plan)
    tile = operand(plan, q, lines(number_type(plan), ROWS, plan.columns))
    return mma.make_fragment_A(mma.get_slice(0).partition_A(tile))


def k_operand(plan: Plan90, k: cute.Pointer, buffer: int) -> cute.Tensor:
    """Return a tile of keys as the B operand, (MMA, 1, columns / 16)."""
    mma = qk_mma(plan)
    tile = operand(plan, buffer_start(k, buffer), lines(number_type(plan), KEYS, plan.columns))
    return mma.make_fragment_B(mma.get_slice(0).partition_B(tile))


def v_operand(plan: Plan90, k: cute.Pointer, buffer: int, team: int, slice: Int32) -> cute.Tensor:
    """Return the team's columns of V of a tile as the B operand, (MMA, products, KEYS / 16)."""
    mma = pv_mma(plan, False)
    atom = warpgroup.make_smem_layout_atom(_ATOMS[MN], number_type(plan))
    layout = cute.tile_to_shape(atom, (plan.team_columns, KEYS), (1, 0))
    start = buffer_start(k, buffer, team * HALF)
    if plan.config.slices > 1:
        start = start + slice * (KEYS * plan.team_columns)
    tile = operand(plan, start, layout)
    return mma.make_fragment_B(mma.get_slice(0).partition_B(tile))


def p_tile(plan: Plan90, k: cute.Pointer, buffer: int) -> cute.Tensor:
    """Return P of a tile in shared memory, (row, key)."""
    return operand(plan, buffer_start(k, buffer, PANELS), lines(number_type(plan), ROWS, KEYS))


def p_operand(plan: Plan90, k: cute.Pointer, buffer: int) -> cute.Tensor:
    """Return P in shared memory as the A operand, (MMA, 1, KEYS / 16)."""
    mma = pv_mma(plan, True)
    return mma.make_fragment_A(mma.get_slice(0).partition_A(p_tile(plan, k, buffer)))


def p_registers(plan: Plan90) -> cute.Tensor:
    """Return a thread's registers for its part of P as the A operand."""
    mma = pv_mma(plan, False)
    return cute.make_rmem_tensor(mma.partition_shape_A((ROWS, KEYS)), number_type(plan))


def score_registers(plan: Plan90) -> cute.Tensor:
    """Return a thread's fp32 registers for its part of S, 64 x 64."""
    return cute.make_rmem_tensor(qk_mma(plan).partition_shape_C((ROWS, KEYS)), Float32)


def o_registers(plan: Plan90) -> cute.Tensor:
    """Return a thread's fp32 registers for its part of the team's columns of O."""
    mma = pv_mma(plan, False)
    return cute.make_rmem_tensor(mma.partition_shape_C((ROWS, plan.team_columns)), Float32)


@cute.jit
def issue_scores(
    plan: Plan90,
    scores: cute.Tensor,
    q: cute.Tensor,
    k: cute.Tensor,
    panels: cutlass.Constexpr,
    accumulate: cutlass.Constexpr,
) -> None:
    """Issue S = Q K^T, or S += Q K^T, over these panels, as one group."""
    mma = qk_mma(plan)
    warpgroup.fence()
    for number in cutlass.range_constexpr(len(panels)):
        for step in cutlass.range_constexpr(STEPS):
            block = panels[number] * STEPS + step
            mma.set(warpgroup.Field.ACCUMULATE, accumulate or number + step > 0)
            cute.gemm(mma, scores, q[None, None, block], k[None, None, block], scores)
    warpgroup.commit_group()


@cute.jit
def issue_wide_scores(
    plan: Plan90, scores: cute.Tensor, buffers: Buffers, buffer: cutlass.Constexpr
) -> None:
    """Issue S += Q K^T over the last panel, which is bf16, as one group."""
    mma = mma_of_scores(BFloat16)
    part, layout = mma.get_slice(0), lines(BFloat16, ROWS, PANEL)
    rows = shared(buffers.q + plan.half_panels * (PANEL_BYTES // 2), layout)
    keys = shared(buffer_start(buffers.k, buffer, plan.half_panels), layout)
    q = mma.make_fragment_A(part.partition_A(rows))
    k = mma.make_fragment_B(part.partition_B(keys))
    warpgroup.fence()
    for step in cutlass.range_constexpr(STEPS):
        mma.set(warpgroup.Field.ACCUMULATE, True)
        cute.gemm(mma, scores, q[None, None, step], k[None, None, step], scores)
    warpgroup.commit_group()


@cute.jit
def issue_values(
    plan: Plan90, o: cute.Tensor, p: cute.Tensor, v: cute.Tensor, from_smem: cutlass.Constexpr
) -> None:
    """Issue O += P V as one group; P and O belong to the tensor core until the wait for it."""
    mma = pv_mma(plan, from_smem)
    warpgroup.fence()
    for step in cutlass.range_constexpr(cute.size(v, mode=[2])):
        mma.set(warpgroup.Field.ACCUMULATE, True)
        cute.gemm(mma, o, p[None, None, step], v[None, None, step], o)
    warpgroup.commit_group()
