"""Products of a warpgroup, and their operands (device code).

S = Q K^T reads both operands from shared memory. O += P V reads P from registers, or from shared
memory if another warpgroup computed it. V is stored [key, d] with d contiguous, so as the B operand
(N = d, K = key) it is MN-major. Element e = c + 2 h + 4 j of a thread's accumulator is
column 8 j + 2 (lane % 4) + c of row lane / 4 + 8 h. The row counts within the sixteen of its warp.
As the A operand of the next product the elements have the same order.

In e4m3 Q is one tile or two, whose products with K are added, and V is K-major, since
`fp8.Turn` transposed it. A word of the A operand is then four keys of a row: for the tensor core
keys 4 (lane % 4) .. of sixteen, here keys 2 (lane % 4), + 1, + 8 and + 9, which a thread has of S.
A sum does not depend on the order of keys, and V is transposed with its keys in this order.

A TiledMma is rebuilt wherever it is used: passed through a loop it stops being a constant.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import hopper_helpers as sm90

from fmha.shared.args import IO_TYPES, OUT_TYPES, Lane, Scope, Work
from fmha.shared.walk import row_of
from fmha.sm90.layout import VT_STAGES
from fmha.sm90.plan import Plan90
from kernelkit.device.umma import shared
from kernelkit.plan import hw


@cute.jit
def own_lane(plan: Plan90, work: Work, scope: Scope, team: Int32) -> Lane:
    """Return this thread's position in the block. team: its warpgroup."""
    tile, part = team // plan.layout.sharers, team % plan.layout.sharers
    lane = cute.arch.lane_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % hw.WARPGROUP_WARPS
    first = warp * 16 + lane // 4
    rows = (
        row_of(plan, work, scope.tensors, scope.scalars, tile, first),
        row_of(plan, work, scope.tensors, scope.scalars, tile, first + 8),
    )
    real = (rows[0].token < work.q_length, rows[1].token < work.q_length)
    return Lane(team, tile, part, first, warp, lane % 4 * 2, rows, real)


K, MN = OperandMajorMode.K, OperandMajorMode.MN
ATOMS = {  # by the bytes of a line
    (128, K): warpgroup.SmemLayoutAtomKind.K_SW128,
    (64, K): warpgroup.SmemLayoutAtomKind.K_SW64,
    (32, K): warpgroup.SmemLayoutAtomKind.K_SW32,
    (128, MN): warpgroup.SmemLayoutAtomKind.MN_SW128,
    (64, MN): warpgroup.SmemLayoutAtomKind.MN_SW64,
}


def make_qk_mma(plan: Plan90) -> cute.TiledMma:
    """Make the MMA of Q K^T: Q and K K-major from shared memory."""
    io, tile = IO_TYPES[plan.config.keys_dtype], (plan.layout.rows, plan.layout.tile_n)
    return sm90.make_trivial_tiled_mma(io, io, K, K, Float32, (1, 1, 1), tile)


def make_pv_mma(plan: Plan90, columns: int = 0, from_smem: bool = False) -> cute.TiledMma:
    """Make the MMA of P V: P from registers or shared memory; V MN-major from shared memory, or
    transposed.

    columns: columns of V and O, by default of one product.
    """
    io, tile = IO_TYPES[plan.config.keys_dtype], (plan.layout.rows, columns or plan.layout.o_part)
    major = K if plan.config.is_fp8 else MN
    source = warpgroup.OperandSource.SMEM if from_smem else warpgroup.OperandSource.RMEM
    return sm90.make_trivial_tiled_mma(io, io, K, major, Float32, (1, 1, 1), tile, source)


def panels(
    plan: Plan90, major: OperandMajorMode, rows: int, columns: int, stages: int
) -> cute.ComposedLayout:
    """Return the layout of tiles of `rows` lines in shared memory, panel by panel.

    As an operand (rows, columns, stage), or if lines are its K, (columns, rows, stage).
    """
    return panels_of(
        plan.config.keys_dtype, major, rows, columns, plan.layout.panel(columns), stages
    )


def panels_of(
    dtype: str, major: OperandMajorMode, rows: int, columns: int, panel: int, stages: int
) -> cute.ComposedLayout:
    """Return the layout of `panels` for any dtype, with lines of `panel` columns."""
    element = OUT_TYPES[dtype]
    atom = warpgroup.make_smem_layout_atom(ATOMS[panel * element.width // 8, major], element)
    if major == K:
        return cute.tile_to_shape(atom, (rows, columns, stages), (0, 1, 2))
    return cute.tile_to_shape(atom, (columns, rows, stages), (1, 0, 2))


def q_operand(plan: Plan90, mma: cute.TiledMma, pointer: cute.Pointer) -> cute.Tensor:
    """Return Q as the A operand, (MMA, 1, k_columns / 16, pieces of terms of query tiles)."""
    pieces = plan.layout.q_tiles * plan.config.q_terms * plan.layout.k_pieces
    layout = panels(plan, K, plan.layout.rows, plan.layout.k_columns, pieces)
    pointer = cute.recast_ptr(pointer, dtype=IO_TYPES[plan.config.keys_dtype])
    return mma.make_fragment_A(mma.get_slice(0).partition_A(shared(pointer, layout)))


def k_operand(plan: Plan90, mma: cute.TiledMma, pointer: cute.Pointer) -> cute.Tensor:
    """Return the pieces in the K ring as the B operand, (MMA, 1, k_columns / 16, stage)."""
    layout = panels(plan, K, plan.layout.tile_n, plan.layout.k_columns, plan.layout.stages[0])
    return mma.make_fragment_B(mma.get_slice(0).partition_B(shared(pointer, layout)))


def v_operand(plan: Plan90, mma: cute.TiledMma, pointer: cute.Pointer, part: Int32) -> cute.Tensor:
    """Return the pieces in the V ring as the B operand, (MMA, 1, tile_n / 16, stage).

    If V is transposed, only the columns of `part`.
    """
    keys, columns = plan.layout.tile_n, plan.layout.o_part
    if plan.config.is_fp8:
        layout = panels(plan, K, plan.config.v_dim, keys, VT_STAGES)
    else:
        layout = panels(plan, MN, keys, plan.layout.v_columns, plan.layout.stages[1])
    ring = shared(pointer, layout)
    if ring.shape[0] != columns:
        ring = cute.local_tile(ring, (columns, keys), (part, 0, None))
    return mma.make_fragment_B(mma.get_slice(0).partition_B(ring))


def accumulator(mma: cute.TiledMma, rows: int, columns: int) -> cute.Tensor:
    """Return a thread's fp32 registers for its part of rows x columns."""
    return cute.make_rmem_tensor(mma.partition_shape_C((rows, columns)), Float32)


def make_products(plan: Plan90, scores: cute.Tensor) -> tuple[cute.Tensor, ...]:
    """Return a thread's registers for the products that are added to O.

    The first ones alias the registers of `scores`, which ptxas would not do by itself.
    """
    layout, count = plan.layout, plan.layout.shape.products
    own = [accumulator(make_pv_mma(plan), layout.rows, layout.o_part) for _ in range(count)]
    over = [
        cute.make_tensor(scores.iterator + number * cute.size(product), product.layout)
        for number, product in enumerate(own[: count - layout.apart(layout.tile_n)])
    ]
    return (*over, *own[len(over) :])


def p_registers(plan: Plan90) -> cute.Tensor:
    """Return a thread's registers for its part of P as the A operand, (MMA, 1, tile_n / 16)."""
    shape = make_pv_mma(plan).partition_shape_A((plan.layout.rows, plan.layout.tile_n))
    return cute.make_rmem_tensor(shape, IO_TYPES[plan.config.keys_dtype])


def shared_p(plan: Plan90, pointer: cute.Pointer) -> cute.Tensor:
    """Return P in shared memory, (rows, tile_n, warpgroup that computed it)."""
    layout = panels(plan, K, plan.layout.rows, plan.layout.tile_n, plan.layout.teams)
    return shared(pointer, layout)


def shared_p_operand(plan: Plan90, pointer: cute.Pointer) -> cute.Tensor:
    """Return P in shared memory as the A operand, (MMA, 1, tile_n / 16, warpgroup)."""
    mma = make_pv_mma(plan, from_smem=True)
    return mma.make_fragment_A(mma.get_slice(0).partition_A(shared_p(plan, pointer)))


@cute.jit
def issue(
    mma: cute.TiledMma,
    d: cute.Tensor,
    terms: tuple[cute.Tensor, ...],
    b: cute.Tensor,
    accumulate: cutlass.Constexpr,
) -> None:
    """Issue D = A B, or D += A B, as one group, with A the sum of terms.

    The registers of D, and of A if it lies in registers, belong to the tensor core until the wait
    for the group.
    """
    warpgroup.fence()
    for number in cutlass.range_constexpr(len(terms)):
        for k_block in cutlass.range_constexpr(cute.size(b, mode=[2])):
            mma.set(warpgroup.Field.ACCUMULATE, accumulate or number + k_block > 0)
            cute.gemm(mma, d, terms[number][None, None, k_block], b[None, None, k_block], d)
    warpgroup.commit_group()


@cute.jit
def issue_qk(plan: Plan90, scores: cute.Tensor, q: tuple[cute.Tensor, ...], k: cute.Tensor) -> None:
    """Issue S = Q K^T of a query tile, term by term, and a key tile, (MMA, 1, head_dim / 16)."""
    issue(make_qk_mma(plan), scores, q, k, False)


@cute.jit
def issue_pv(
    plan: Plan90,
    o: cute.Tensor,
    p: cute.Tensor,
    v: cute.Tensor,
    from_smem: cutlass.Constexpr = False,
) -> None:
    """Issue O += P V of a query tile and a key tile, (MMA, 1, tile_n / 16); in e4m3 O = P V."""
    issue(make_pv_mma(plan, from_smem=from_smem), o, (p,), v, not plan.config.is_fp8)
