"""Products of a warp and 16 keys: S^T = K Q^T and O^T += V^T P (device code).

Keys of 16 bits are A fragments as ldmatrix loads them. Keys of 8 bits come as pairs. A lane gets
four adjacent dims, but the fragment needs two and two eight further on, or two dims of each of two
keys. So the dims of a step are permuted. Q is loaded in that order, and O is written back
accordingly (`query_words`, `dims_of`). e4m3 keys are widened to fp16, exactly.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from gqa_lowlatency.config import DecodeConfig
from gqa_lowlatency.portable.plan import PortablePlan
from gqa_lowlatency.portable.queries import Queries, query_address
from kernelkit.device import warp_mma
from kernelkit.device.boxes import turn
from kernelkit.device.shared_words import load
from kernelkit.plan import hw

EVERY_OTHER = 0x3120  # prmt selector: bytes 0, 2, then 1, 3


@cute.jit
def dims_of(config: DecodeConfig, step: cutlass.Constexpr, half: cutlass.Constexpr) -> Int32:
    """Return the dim of O^T in this lane's rows of an accumulator."""
    group = cute.arch.lane_idx() // 4
    if cutlass.const_expr(config.keys_dtype == "e4m3"):
        return step * 16 + 2 * group + half
    return step * 16 + group + 8 * half


@cute.jit
def chunk_offset(plan: PortablePlan, row: Int32, chunk: Int32) -> Int32:
    """Return the offset of a 16-byte chunk of a key in its slot; eight rows cover all banks."""
    moved = turn(row, min(plan.row_bytes, hw.SMEM_LINE_BYTES))
    return row * plan.row_bytes + (chunk ^ moved) * warp_mma.CHUNK_BYTES


@cute.jit
def score(plan: PortablePlan, slot: Int32, queries: Queries, scores: cute.Tensor) -> None:
    """Compute scores (4, columns / 8) = 16 keys x Q^T. slot: address of K."""
    config, lane = plan.config, cute.arch.lane_idx()
    scores.fill(0.0)
    for pair in cutlass.range_constexpr(plan.row_bytes // (2 * warp_mma.CHUNK_BYTES)):
        address = slot + chunk_offset(plan, lane % 16, pair * 2 + lane // 16)
        words = warp_mma.load_fragment(address, False)
        if cutlass.const_expr(config.keys_dtype == "e4m3"):
            for half in cutlass.range_constexpr(2):
                low = warp_mma.widen(words[2 * half], plan.q_dtype)
                high = warp_mma.widen(words[2 * half + 1], plan.q_dtype)
                a = (low[0], high[0], low[1], high[1])
                add_keys(plan, a, 2 * pair + half, queries, scores)
        else:
            add_keys(plan, words, pair, queries, scores)


@cute.jit
def add_keys(
    plan: PortablePlan,
    a: tuple[Uint32, ...],
    step: cutlass.Constexpr,
    queries: Queries,
    scores: cute.Tensor,
) -> None:
    """Add one step of 16 dims to the scores of all columns. a: fragment of K."""
    for tile in cutlass.range_constexpr(plan.config.columns // 8):
        if cutlass.const_expr(plan.queries_in_smem):
            b = load(query_address(plan, queries.address, step, tile), Uint32, 2)
        else:
            b = (queries.words[0, step, tile], queries.words[1, step, tile])
        warp_mma.multiply(scores[None, tile], a, b, plan.q_dtype)


@cute.jit
def accumulate(plan: PortablePlan, slot: Int32, weights: cute.Tensor, o: cute.Tensor) -> None:
    """Add V^T P to O^T, with P rounded to the dtype of the product. slot: address of V."""
    config, lane = plan.config, cute.arch.lane_idx()
    p = cute.make_rmem_tensor((2, config.columns // 8), Uint32)
    for tile in cutlass.range_constexpr(config.columns // 8):
        for half in cutlass.range_constexpr(2):
            low, high = weights[2 * half, tile], weights[2 * half + 1, tile]
            p[half, tile] = warp_mma.transpose(warp_mma.pack(low, high, plan.p_dtype))
    row = lane % 8 + (lane // 16) * 8
    for pair in cutlass.range_constexpr(plan.row_bytes // (2 * warp_mma.CHUNK_BYTES)):
        address = slot + chunk_offset(plan, row, pair * 2 + (lane // 8) % 2)
        words = warp_mma.load_fragment(address, True)
        if cutlass.const_expr(config.keys_dtype == "e4m3"):
            for half in cutlass.range_constexpr(2):
                first = warp_mma.widen(warp_mma.permute(words[half], EVERY_OTHER), plan.p_dtype)
                second = warp_mma.widen(
                    warp_mma.permute(words[half + 2], EVERY_OTHER), plan.p_dtype
                )
                a = (first[0], first[1], second[0], second[1])
                add_values(plan, a, 2 * pair + half, p, o)
        else:
            # Chunks 0 and 1 of keys 0-7, then of keys 8-15: a 16 x 16 fragment has rows (dims) 0-7
            # and 8-15 of the first eight keys, then of the other eight.
            add_values(plan, words, pair, p, o)


@cute.jit
def add_values(
    plan: PortablePlan,
    a: tuple[Uint32, ...],
    step: cutlass.Constexpr,
    p: cute.Tensor,
    o: cute.Tensor,
) -> None:
    """Add P to 16 dims of O^T, for all columns. a: fragment of V^T."""
    for tile in cutlass.range_constexpr(plan.config.columns // 8):
        warp_mma.multiply(o[None, tile, step], a, (p[0, tile], p[1, tile]), plan.p_dtype)
