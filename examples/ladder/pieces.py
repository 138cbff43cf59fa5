"""Device code that the three kernels of the ladder share: everything but the order of events.

One CTA computes 128 queries of one head. For each tile of 128 keys

    S = Q K^T        tensor core, fp32 into tensor memory
    P = exp2(...)    thread r has row r of S in registers: mask, maximum, weights, sum
    O += P V         tensor core into tensor memory, then added to row r in registers

The rungs differ in which warp does which step and which waits they need. A `Plan` describes that.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.memory import SmemAllocator
from cutlass.utils import blackwell_helpers as sm100

from kernelkit.device import tmem
from kernelkit.device.boxes import (
    ROWS_FIRST,
    Box,
    BoxPosition,
    TmaTensor,
    copy_in,
    describe,
    reorder,
)
from kernelkit.device.buffers import buffer_at
from kernelkit.device.online_softmax import (
    exponentiate,
    finish_row,
    next_max,
    row_total,
    shift_of,
    top_score,
)
from kernelkit.device.pipelines import Event, make_pipelines, publish_barriers
from kernelkit.device.umma import accumulator, issue, shared
from kernelkit.plan import hw
from kernelkit.plan.edges import EdgePlan
from kernelkit.plan.log2 import LOG2_E
from kernelkit.plan.smem import SmemBuffer, SmemPlan
from kernelkit.plan.tmem import TmemPlan
from kernelkit.plan.warps import RolePlan

TILE = 128  # queries of a CTA, keys of a tile, lanes of tensor memory
HEAD_DIM = 64
BF16 = cutlass.BFloat16
BOX = Box(TILE, HEAD_DIM, BF16)  # a tile of Q, K or V: 128 lines of 128 bytes
TILE_BYTES = TILE * HEAD_DIM * BF16.width // 8
QK_TILE = (TILE, TILE, HEAD_DIM)  # (M, N, K) of S = Q K^T
PV_TILE = (TILE, HEAD_DIM, TILE)  # (M, N, K) of O = P V


@dataclass(frozen=True)
class Plan:
    """Roles, edges and memory maps of a kernel: everything decided before tracing."""

    roles: RolePlan
    edges: EdgePlan
    smem: SmemPlan
    tmem: TmemPlan

    def check(self) -> None:
        """Raise ValueError for a plan that cannot run."""
        for part in (self.roles, self.edges, self.smem, self.tmem):
            part.check()


def shared_memory(edges: EdgePlan, stages: int) -> SmemPlan:
    """Plan the buffers: one tile of Q, and rings of `stages` tiles of K and of V."""
    return SmemPlan(
        (
            SmemBuffer("barriers", edges.barrier_bytes, align=hw.MBARRIER_BYTES),
            SmemBuffer("tmem_base", 4, align=4),
            SmemBuffer("sQ", TILE_BYTES),
            SmemBuffer("sK", TILE_BYTES, stages),
            SmemBuffer("sV", TILE_BYTES, stages),
        )
    )


@dataclass(frozen=True)
class Tensors:
    """Tensors in global memory: q, k and v are read by TMA; o is (query, D, head, batch)."""

    q: TmaTensor
    k: TmaTensor
    v: TmaTensor
    o: cute.Tensor

    @property
    def keys(self) -> Int32:
        return cute.size(self.k.tensor, mode=[0])


@dataclass(frozen=True)
class Chip:
    """On-chip memory of the CTA, and the edges of its plan by name."""

    q: cute.Pointer
    k: cute.Pointer
    v: cute.Pointer
    tmem: cute.Pointer
    pipes: dict[str, Event]


@dataclass(frozen=True)
class Lane:
    """Row r of the tile, which thread r of four warps keeps in registers."""

    thread: Int32
    query: Int32
    scores: cute.Tensor  # (128,) fp32: S, then its weights
    output: cute.Tensor  # (64,) fp32: the sum of P V so far


class Attention:
    """Kernel for O = softmax(mask(scale Q K^T)) V; a rung adds a `plan` and a `kernel`.

    q and o are bfloat16 [B, Sq, H, 64]. k and v are bfloat16 [B, Skv, H, 64] with Skv > 0. The last
    dim is contiguous, and scale > 0.
    """

    plan: Plan

    def __init__(self, mask: Callable | None) -> None:
        self.mask = mask
        self.plan.check()

    @cute.jit
    def __call__(
        self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, o: cute.Tensor, scale: Float32
    ) -> None:
        """Describe the TMA copies and launch a CTA per tile of queries, head and batch entry."""
        fetch = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
        copies = [describe(fetch, reorder(tensor, ROWS_FIRST), BOX) for tensor in (q, k, v)]
        batch, queries, heads, _ = q.shape
        self.kernel(Tensors(*copies, reorder(o, ROWS_FIRST)), scale * LOG2_E).launch(
            grid=(cute.ceil_div(queries, TILE), heads, batch),
            block=(self.plan.roles.threads, 1, 1),
        )


def example_arguments() -> tuple:
    """Return the arguments to compile for: any lengths, heads, batch and strides."""
    batch, heads, queries, keys = (cute.sym_int32() for _ in range(4))

    def tensor(tokens: cute.SymInt) -> Any:
        strides = tuple(cute.sym_int64(divisibility=8) for _ in range(3))
        shape = (batch, tokens, heads, HEAD_DIM)
        return cute.runtime.make_fake_tensor(BF16, shape, (*strides, 1), assumed_align=16)

    return tensor(queries), tensor(keys), tensor(keys), tensor(queries), Float32(1.0)


@cute.jit
def set_up(plan: Plan) -> Chip:
    """All threads: shared memory, barriers and tensor memory, ready for use."""
    smem = SmemAllocator().allocate(plan.smem.bytes, byte_alignment=hw.SMEM_SWIZZLE_ALIGN)
    pipes = make_pipelines(plan.edges, buffer_at(plan.smem, smem, "barriers", Int64))
    tmem_base = buffer_at(plan.smem, smem, "tmem_base", Int32)
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
        cute.arch.alloc_tmem(plan.tmem.allocated, tmem_base)
        cute.arch.relinquish_tmem_alloc_permit()
    publish_barriers(plan.edges)
    tiles = [buffer_at(plan.smem, smem, name, BF16) for name in ("sQ", "sK", "sV")]
    return Chip(*tiles, cute.arch.retrieve_tmem_ptr(Float32, 16, tmem_base), pipes)


@cute.jit
def tear_down(plan: Plan, chip: Chip) -> None:
    """All threads: free tensor memory once every row has been read."""
    cute.arch.sync_threads()
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
        cute.arch.dealloc_tmem(chip.tmem, plan.tmem.allocated)


@cute.jit
def fetch(source: TmaTensor, tile: Int32, buffer: cute.Pointer, pipe: Event, stage: Int32) -> None:
    """Start the copy of a tile into a stage of `pipe`, whose barrier counts its bytes.

    One warp executes this.
    """
    _, head, batch = cute.arch.block_idx()
    position = BoxPosition(tile * TILE, Int32(0), head, batch)
    copy_in(source, BOX, position, BOX.at(buffer, stage), pipe.barrier(stage))


@cute.jit
def issue_qk(chip: Chip, s_column: Int32, k_stage: Int32) -> None:
    """Issue S = Q K^T from one warp.

    A TiledMma is made where it is used; see kernelkit/README.md.
    """
    major = (OperandMajorMode.K, OperandMajorMode.K)
    mma = sm100.make_trivial_tiled_mma(
        BF16, BF16, *major, Float32, tcgen05.CtaGroup.ONE, QK_TILE[:2]
    )
    # Operands have the modes (MMA, MMA_M or MMA_N, MMA_K).
    q_layout = sm100.make_smem_layout_a(mma, QK_TILE, BF16, 1)
    tSrQ = mma.make_fragment_A(shared(chip.q, q_layout))[None, None, None, 0]
    k_layout = sm100.make_smem_layout_b(mma, QK_TILE, BF16, 1)
    tSrK = mma.make_fragment_B(shared(stage_of(chip.k, k_stage), k_layout))[None, None, None, 0]
    issue(mma, accumulator(mma, QK_TILE, chip.tmem, s_column), tSrQ, tSrK, False)


@cute.jit
def issue_pv(chip: Chip, p_column: Int32, o_column: Int32, v_stage: Int32) -> None:
    """Issue O = P V from one warp, with P in tensor memory and the columns of V as N."""
    major = (OperandMajorMode.K, OperandMajorMode.MN)
    source = tcgen05.OperandSource.TMEM
    mma = sm100.make_trivial_tiled_mma(
        BF16, BF16, *major, Float32, tcgen05.CtaGroup.ONE, PV_TILE[:2], source
    )
    p_layout = sm100.make_smem_layout_a(mma, PV_TILE, BF16, 1)
    p = mma.make_fragment_A(cute.make_tensor(chip.tmem, p_layout.outer))[None, None, None, 0]
    tOrP = cute.make_tensor(cute.recast_ptr(chip.tmem + p_column, dtype=BF16), p.layout)
    v_layout = sm100.make_smem_layout_b(mma, PV_TILE, BF16, 1)
    tOrV = mma.make_fragment_B(shared(stage_of(chip.v, v_stage), v_layout))[None, None, None, 0]
    issue(mma, accumulator(mma, PV_TILE, chip.tmem, o_column), tOrP, tOrV, False)


def stage_of(buffer: cute.Pointer, stage: Int32) -> cute.Pointer:
    """Return the address of a stage in a ring of tiles."""
    return (buffer + stage * (TILE * HEAD_DIM)).align(hw.SMEM_SWIZZLE_ALIGN)


@cute.jit
def own_row() -> Lane:
    """The row of this thread, which is one of the first 128; its output is 0."""
    thread, _, _ = cute.arch.thread_idx()
    q_tile, _, _ = cute.arch.block_idx()
    output = cute.make_rmem_tensor(HEAD_DIM, Float32)
    output.fill(0.0)
    scores = cute.make_rmem_tensor(TILE, Float32)
    return Lane(thread, q_tile * TILE + thread, scores, output)


@cute.jit
def read_scores(lane: Lane, chip: Chip, s_column: Int32) -> None:
    """This thread's row of S into its registers; the caller has waited for S."""
    tmem.order_after_wait()
    tmem.load_row(tmem.tile_at(chip.tmem, s_column, TILE), lane.scores, lane.thread)
    tmem.wait_loads()


@cute.jit
def hide(lane: Lane, first_key: Int32, keys: Int32, mask: cutlass.Constexpr) -> None:
    """Keys that the row does not see, and those behind the last one, score -inf."""
    for column in cutlass.range(TILE, unroll_full=True):
        key = first_key + column
        visible = key < keys
        if cutlass.const_expr(mask is not None):
            visible = visible & mask(lane.query, key)
        lane.scores[column] = lane.scores[column] if visible else -Float32.inf


@cute.jit
def weigh(
    lane: Lane, row_max: Float32, row_sum: Float32, scale_log2: Float32
) -> tuple[Float32, Float32, Float32]:
    """Scores become weights exp2(scale_log2 (s - row_max)) in place.

    Returns (row_max, row_sum, acc_scale), the last being what earlier sums are to be multiplied by.
    """
    row_max, acc_scale = next_max(top_score(lane.scores, row_max), row_max, scale_log2, 0.0)
    exponentiate(lane.scores, scale_log2, shift_of(row_max, scale_log2))
    return row_max, row_total(lane.scores, row_sum * acc_scale), acc_scale


@cute.jit
def write_weights(lane: Lane, chip: Chip, p_column: Int32) -> None:
    """Round this thread's row of P into tensor memory; the caller then signals."""
    packed = cute.make_rmem_tensor(TILE // 2, Float32)  # two bfloat16 to a column
    cute.recast_tensor(packed, BF16).store(lane.scores.load().to(BF16))
    tmem.store_row(packed, tmem.tile_at(chip.tmem, p_column, TILE // 2), lane.thread)
    tmem.wait_stores()
    tmem.order_before_signal()


@cute.jit
def add_product(lane: Lane, chip: Chip, o_column: Int32) -> None:
    """Add this thread's row of P V to its output; the caller has waited for the product."""
    product = cute.make_rmem_tensor(HEAD_DIM, Float32)
    tmem.order_after_wait()
    tmem.load_row(tmem.tile_at(chip.tmem, o_column, HEAD_DIM), product, lane.thread)
    tmem.wait_loads()
    tmem.order_before_signal()
    lane.output.store(lane.output.load() + product.load())


@cute.jit
def store_row(lane: Lane, o: cute.Tensor, row_max: Float32, row_sum: Float32) -> None:
    """Normalise the row and store it, if the tensor has it; 0 where it saw no key."""
    _, head, batch = cute.arch.block_idx()
    factor, _ = finish_row(row_max, row_sum)
    if lane.query < cute.size(o, mode=[0]):
        rounded = cute.make_rmem_tensor(HEAD_DIM, BF16)
        rounded.store((lane.output.load() * factor).to(BF16))
        cute.autovec_copy(rounded, o[lane.query, None, head, batch])
