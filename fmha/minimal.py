"""Rung 0 of the ladder: the simplest attention forward that uses TMA, tcgen05 and TMEM.

One CTA of four warps owns one 128-row tile of Q and one head. For every 128-row tile of K and V
it loads, multiplies, exponentiates and multiplies again, strictly one after the other: no warp
specialisation, no pipeline, one buffer of everything, O accumulated in registers. Thread r owns
row r of the tile, which is lane r of TMEM. bfloat16, head_dim 64, no mask, any lengths.

    compiled = fmha.launch.compile_minimal()       # for sm_100a; no GPU is needed
    target = Target("emulate", "sm_100a")           # on a Blackwell GPU Target("cuda", "sm_100a")
    kernelkit.launch.launch(compiled, (q, k, v, o, scale), target, q.device)

q, o: [B, Sq, H, 64]; k, v: [B, Skv, H, 64], bfloat16, last dim contiguous, the other strides
multiples of 8 elements, base addresses 16-byte aligned; scale: float, multiplies q.k (> 0).
The fast kernel is `sm100/kernel.py`; what it adds to this file is overlap, not mathematics.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.memory import SmemAllocator
from cutlass.utils import blackwell_helpers as sm100

from kernelkit import tmem
from kernelkit.boxes import reorder
from kernelkit.fake import fake_tensor
from kernelkit.log2 import LOG2_E

HEAD_DIM = 64
TILE_M = 128  # query rows of a CTA = threads of a CTA = lanes of TMEM
TILE_N = 128  # key rows of one step
QK_TILE = (TILE_M, TILE_N, HEAD_DIM)
PV_TILE = (TILE_M, HEAD_DIM, TILE_N)
Q_BYTES = TILE_M * HEAD_DIM * 2
K_BYTES = V_BYTES = TILE_N * HEAD_DIM * 2
TMEM_S = 0  # fp32 S: columns 0..127
TMEM_P = 64  # bf16 P: columns 64..127, over the tail of S, which is in registers by then
TMEM_O = 128  # fp32 product of one step: columns 128..191
TMEM_COLUMNS = 256  # allocations are powers of two
BF16 = cutlass.BFloat16


@dataclass(frozen=True)
class Products:
    """The tiled MMAs of S = Q K^T and of O = P V."""

    qk: cute.TiledMma
    pv: cute.TiledMma


@dataclass(frozen=True)
class Operand:
    """A tensor that TMA brings to shared memory."""

    atom: cute.CopyAtom
    tensor: cute.Tensor  # coordinates (S, D, H, B), for V (D, S, H, B)
    layout: cute.ComposedLayout  # of its tile in shared memory


@cute.struct
class SharedStorage:
    """Barriers (one arrival per phase each) and the address that tcgen05.alloc returns."""

    loaded: Int64  # the TMA bytes have landed
    multiplied: Int64  # the tensor core has finished
    tmem_base: Int32


@cute.jit
def multiply(mma: cute.TiledMma, d: cute.Tensor, a: cute.Tensor, b: cute.Tensor) -> None:
    """Issue D = A B, k block by k block. A later tcgen05.commit announces its completion."""
    for k_block in cutlass.range_constexpr(cute.size(a, mode=[2])):
        mma.set(tcgen05.Field.ACCUMULATE, k_block != 0)
        cute.gemm(mma, d, a[None, None, k_block], b[None, None, k_block], d)


@cute.jit
def tma_views(
    atom: cute.CopyAtom, smem: cute.Tensor, gmem: cute.Tensor
) -> tuple[cute.Tensor, cute.Tensor]:
    """(shared view, global view) of a tile for one TMA copy; modes behind the tile stay."""
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 3), cute.group_modes(gmem, 0, 3)
    )


@cute.jit
def exponentiate(
    scores: cute.Tensor, visible: Int32, old_max: Float32, row_sum: Float32, scale_log2: Float32
) -> tuple[Float32, Float32, Float32]:
    """Scores (128,) become weights in place; columns from `visible` on get none.

    old_max, row_sum: so far. Returns (row_max, row_sum, acc_scale), where acc_scale is what sums
    taken under the old maximum are to be multiplied by.
    """
    for column in cutlass.range(TILE_N, unroll_full=True):
        scores[column] = scores[column] if column < visible else -Float32.inf
    row_max = scores.load().reduce(cute.ReductionOp.MAX, old_max, 0)
    acc_scale = cute.math.exp2((old_max - row_max) * scale_log2, fastmath=True)
    row_sum = row_sum * acc_scale
    for column in cutlass.range(TILE_N, unroll_full=True):
        scores[column] = cute.math.exp2((scores[column] - row_max) * scale_log2, fastmath=True)
        row_sum = row_sum + scores[column]
    return row_max, row_sum, acc_scale


@cute.kernel
def kernel(
    products: Products, q: Operand, k: Operand, v: Operand, mO: cute.Tensor, scale_log2: Float32
) -> None:
    """Grid (query tiles, heads, batch), 128 threads.

    mO: (Sq, D, H, B); scale_log2: scale * log2(e).
    """
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    q_tile, head, batch = cute.arch.block_idx()
    qk_mma, pv_mma = products.qk, products.pv

    # Allocate: shared memory, barriers, tensor memory.
    smem = SmemAllocator()
    storage = smem.allocate(SharedStorage)
    sQ = smem.allocate_tensor(BF16, q.layout.outer, 1024, swizzle=q.layout.inner)
    sK = smem.allocate_tensor(BF16, k.layout.outer, 1024, swizzle=k.layout.inner)
    sV = smem.allocate_tensor(BF16, v.layout.outer, 1024, swizzle=v.layout.inner)
    loaded, multiplied = storage.loaded.ptr, storage.multiplied.ptr
    if thread == 0:
        cute.arch.mbarrier_init(loaded, 1)
        cute.arch.mbarrier_init(multiplied, 1)
    cute.arch.mbarrier_init_fence()
    if warp == 0:
        cute.arch.alloc_tmem(TMEM_COLUMNS, storage.tmem_base.ptr)
        cute.arch.relinquish_tmem_alloc_permit()
    cute.arch.sync_threads()
    tmem_base = cute.arch.retrieve_tmem_ptr(Float32, 16, storage.tmem_base.ptr)

    # Partition: what TMA copies, and the operands of the two products.
    # -> (TILE_M, HEAD_DIM), (TILE_N, HEAD_DIM, tile), (HEAD_DIM, TILE_N, tile)
    gQ = cute.local_tile(q.tensor, (TILE_M, HEAD_DIM), (q_tile, 0, head, batch))
    gK = cute.local_tile(k.tensor, (TILE_N, HEAD_DIM), (None, 0, head, batch))
    gV = cute.local_tile(v.tensor, (HEAD_DIM, TILE_N), (0, None, head, batch))
    # -> (TMA, 1) and (TMA,) for Q, (TMA, tile) for K and V
    tQsQ, tQgQ = tma_views(q.atom, sQ, qk_mma.get_slice(0).partition_A(gQ))
    tKsK, tKgK = tma_views(k.atom, sK, qk_mma.get_slice(0).partition_B(gK))
    tVsV, tVgV = tma_views(v.atom, sV, pv_mma.get_slice(0).partition_B(gV))
    # -> (MMA, MMA_M or MMA_N, MMA_K)
    tSrQ = qk_mma.make_fragment_A(sQ)[None, None, None, 0]
    tSrK = qk_mma.make_fragment_B(sK)[None, None, None, 0]
    tOrV = pv_mma.make_fragment_B(sV)[None, None, None, 0]
    tS, tO, tOrP = tmem_operands(qk_mma, pv_mma, tmem_base)
    rows_s = tmem.tile_at(tmem_base, TMEM_S, TILE_N)
    rows_p = tmem.tile_at(tmem_base, TMEM_P, TILE_N // 2)
    rows_o = tmem.tile_at(tmem_base, TMEM_O, HEAD_DIM)

    # This thread's row: scores, weights (two bf16 to a register), output and statistics.
    scores = cute.make_rmem_tensor(TILE_N, Float32)
    packed = cute.make_rmem_tensor(TILE_N // 2, Float32)
    weights = cute.make_tensor(
        cute.recast_ptr(packed.iterator, dtype=BF16), cute.make_layout(TILE_N)
    )
    product = cute.make_rmem_tensor(HEAD_DIM, Float32)
    output = cute.make_rmem_tensor(HEAD_DIM, Float32)
    output.fill(0.0)
    row_max, row_sum = -Float32.inf, Float32(0.0)

    kv_length = cute.size(k.tensor, mode=[0])
    for kv_tile in cutlass.range(cute.ceil_div(kv_length, TILE_N)):
        # Load K and V, and Q before the first step.
        if warp == 0:
            with cute.arch.elect_one():
                q_bytes = Q_BYTES if kv_tile == 0 else 0
                cute.arch.mbarrier_arrive_and_expect_tx(loaded, q_bytes + K_BYTES + V_BYTES)
            if kv_tile == 0:
                cute.copy(q.atom, tQgQ[None], tQsQ[None, 0], tma_bar_ptr=loaded)
            cute.copy(k.atom, tKgK[None, kv_tile], tKsK[None, 0], tma_bar_ptr=loaded)
            cute.copy(v.atom, tVgV[None, kv_tile], tVsV[None, 0], tma_bar_ptr=loaded)
        cute.arch.mbarrier_wait(loaded, kv_tile % 2)

        # S = Q K^T.
        if warp == 0:
            tmem.order_after_wait()
            multiply(qk_mma, tS, tSrQ, tSrK)
            with cute.arch.elect_one():
                tcgen05.commit(multiplied)
        cute.arch.mbarrier_wait(multiplied, 0)
        tmem.order_after_wait()

        # P = exp2(scale_log2 * (S - row_max)), and what that does to the past.
        tmem.load_row(rows_s, scores, thread)
        tmem.wait_loads()
        visible = kv_length - kv_tile * TILE_N
        row_max, row_sum, acc_scale = exponentiate(scores, visible, row_max, row_sum, scale_log2)
        weights.store(scores.load().to(BF16))
        tmem.store_row(packed, rows_p, thread)
        tmem.wait_stores()
        tmem.order_before_signal()
        cute.arch.sync_threads()  # every row of P is in TMEM before any of it is multiplied

        # O = O * acc_scale + P V.
        if warp == 0:
            tmem.order_after_wait()
            multiply(pv_mma, tO, tOrP, tOrV)
            with cute.arch.elect_one():
                tcgen05.commit(multiplied)
        cute.arch.mbarrier_wait(multiplied, 1)
        tmem.order_after_wait()
        tmem.load_row(rows_o, product, thread)
        tmem.wait_loads()
        output.store(output.load() * acc_scale + product.load())
        tmem.order_before_signal()
        cute.arch.sync_threads()  # every row has been read before the next step overwrites

    # Normalise, and store the rows that exist.
    row = q_tile * TILE_M + thread
    if row < cute.size(mO, mode=[0]):
        rounded = cute.make_rmem_tensor(HEAD_DIM, BF16)
        rounded.store((output.load() * (1.0 / row_sum)).to(BF16))
        cute.autovec_copy(rounded, mO[row, None, head, batch])
    if warp == 0:
        cute.arch.dealloc_tmem(tmem_base, TMEM_COLUMNS)


@cute.jit
def tmem_operands(
    qk_mma: cute.TiledMma, pv_mma: cute.TiledMma, base: cute.Pointer
) -> tuple[cute.Tensor, cute.Tensor, cute.Tensor]:
    """Accumulators S (128, 128) and O (128, 64), and P as the A operand of PV, in TMEM."""
    tS = qk_mma.make_fragment_C(qk_mma.partition_shape_C((TILE_M, TILE_N)))
    tO = pv_mma.make_fragment_C(pv_mma.partition_shape_C((TILE_M, HEAD_DIM)))
    p_layout = sm100.make_smem_layout_a(pv_mma, PV_TILE, BF16, 1)
    tOrP = pv_mma.make_fragment_A(cute.make_tensor(base, p_layout.outer))
    p_base = cute.recast_ptr(base + TMEM_P, dtype=BF16)
    return (
        cute.make_tensor(base + TMEM_S, tS.layout),
        cute.make_tensor(base + TMEM_O, tO.layout),
        cute.make_tensor(p_base, tOrP.layout)[None, None, None, 0],
    )


@cute.jit
def minimal_attention(
    q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, o: cute.Tensor, scale: Float32
) -> None:
    """Host entry: describe the copies and the products, and launch. Shapes: module docstring."""
    k_major, v_major, one_cta = OperandMajorMode.K, OperandMajorMode.MN, tcgen05.CtaGroup.ONE
    qk_mma = sm100.make_trivial_tiled_mma(
        BF16, BF16, k_major, k_major, Float32, one_cta, QK_TILE[:2]
    )
    p_source = tcgen05.OperandSource.TMEM
    pv_mma = sm100.make_trivial_tiled_mma(
        BF16, BF16, k_major, v_major, Float32, one_cta, PV_TILE[:2], p_source
    )
    q_layout = sm100.make_smem_layout_a(qk_mma, QK_TILE, BF16, 1)
    k_layout = sm100.make_smem_layout_b(qk_mma, QK_TILE, BF16, 1)
    v_layout = sm100.make_smem_layout_b(pv_mma, PV_TILE, BF16, 1)
    load = cpasync.CopyBulkTensorTileG2SOp(one_cta)
    one_stage = [cute.select(layout, mode=[0, 1, 2]) for layout in (q_layout, k_layout, v_layout)]
    atom_q, mQ = cute.nvgpu.make_tiled_tma_atom_A(
        load, reorder(q, (1, 3, 2, 0)), one_stage[0], QK_TILE, qk_mma
    )
    atom_k, mK = cute.nvgpu.make_tiled_tma_atom_B(
        load, reorder(k, (1, 3, 2, 0)), one_stage[1], QK_TILE, qk_mma
    )
    atom_v, mV = cute.nvgpu.make_tiled_tma_atom_B(
        load, reorder(v, (3, 1, 2, 0)), one_stage[2], PV_TILE, pv_mma
    )
    mO = reorder(o, (1, 3, 2, 0))
    batch, q_length, heads, _ = q.shape
    kernel(
        Products(qk_mma, pv_mma),
        Operand(atom_q, mQ, q_layout),
        Operand(atom_k, mK, k_layout),
        Operand(atom_v, mV, v_layout),
        mO,
        scale * LOG2_E,
    ).launch(grid=(cute.ceil_div(q_length, TILE_M), heads, batch), block=(TILE_M, 1, 1))


def host_function(_config: None, _arch: str) -> tuple:
    """What is compiled and example arguments."""
    return minimal_attention, *_fake_arguments()


def _fake_arguments() -> tuple:
    batch, heads, q_length, kv_length = (cute.sym_int32() for _ in range(4))

    def tensor(tokens: cute.SymInt) -> Any:
        return fake_tensor(BF16, batch, tokens, heads, HEAD_DIM, align=16)

    return tensor(q_length), tensor(kv_length), tensor(kv_length), tensor(q_length), Float32(1.0)
