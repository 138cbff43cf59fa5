"""Scores, online softmax and O of a tile of keys (device code).

Row r of a CTA is query row `tile rows + r`; query row t H + h is head h of token t. Fragments are
those of `kernelkit.device.warp_mma`.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from kernelkit.device import warp_mma
from kernelkit.device.online_softmax import finite
from kernelkit.device.shared_words import load, store
from mla.attention.portable.keys import key_offset
from mla.attention.portable.plan import BLOCK, CHUNK, KEYS, P_ROW_BYTES, SLICES, PortablePlan

SCORE_BYTES = 4
TURNED_WORDS = 8  # of scores: rows of one group of four lie in other banks


@dataclass(frozen=True)
class Scratch:
    """Addresses in shared memory, see `plan.smem`."""

    keys: Int32
    scores: Int32
    weights: Int32
    exists: Int32
    factors: Int32
    statistics: Int32


@dataclass(frozen=True)
class State:
    """What a thread keeps over all tiles, in registers.

    o: (4, 8-column tiles of the warp, row blocks), accumulators.
    row_max, row_sum: (rows of the warp,) of the softmax; the sums are those of the lane's keys.
    """

    o: cute.Tensor
    row_max: cute.Tensor
    row_sum: cute.Tensor


@cute.jit
def fresh_state(plan: PortablePlan) -> State:
    """Return the state before any key."""
    state = State(
        cute.make_rmem_tensor((4, plan.columns_of_warp // 8, plan.row_blocks), Float32),
        cute.make_rmem_tensor(plan.rows_of_warp, Float32),
        cute.make_rmem_tensor(plan.rows_of_warp, Float32),
    )
    state.o.fill(0.0)
    state.row_max.fill(-Float32.inf)
    state.row_sum.fill(0.0)
    return state


@cute.jit
def load_queries(plan: PortablePlan, q: cute.Tensor, entry: Int32, first_row: Int32) -> cute.Tensor:
    """Return A fragments of this warp's rows and slice of Q, words (4, steps); missing rows are 0.

    first_row: the first query row of the CTA.
    """
    config, lane = plan.config, cute.arch.lane_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    words = cute.make_rmem_tensor((4, plan.slice_steps), Uint32)
    words.fill(0)
    block = warp // SLICES if cutlass.const_expr(plan.row_blocks > 1) else Int32(0)
    begin = (warp % SLICES) * (plan.slice_steps * BLOCK // 2)  # in words of two columns
    for half in cutlass.range_constexpr(2):
        row = first_row + block * BLOCK + lane // 4 + 8 * half
        if row < q.shape[1] * config.heads:
            token, head = row // config.heads, row % config.heads
            line = cute.recast_tensor(q[entry, token, head, None], Uint32)
            for step in cutlass.range_constexpr(plan.slice_steps):
                column = begin + step * (BLOCK // 2) + lane % 4
                words[half, step] = line[column]
                words[half + 2, step] = line[column + 4]
    return words


@cute.jit
def score(plan: PortablePlan, scratch: Scratch, keys: Int32, queries: cute.Tensor) -> None:
    """Leave this warp's part of the scores of a tile in shared memory. keys: of the stage."""
    lane = cute.arch.lane_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    part, other = warp % SLICES, warp // SLICES
    first_key = other * plan.keys_of_warp if cutlass.const_expr(plan.key_halves > 1) else Int32(0)
    row = other * BLOCK if cutlass.const_expr(plan.row_blocks > 1) else Int32(0)
    tiles = plan.keys_of_warp // 8
    acc = cute.make_rmem_tensor((4, tiles), Float32)
    acc.fill(0.0)
    key = first_key + lane % 8 + (lane // 16) * 8
    for step in cutlass.range_constexpr(plan.slice_steps):
        a = tuple(queries[k, step] for k in range(4))
        chunk = (part * plan.slice_steps + step) * 2 + (lane // 8) % 2
        for pair in cutlass.range_constexpr(tiles // 2):
            address = keys + key_offset(plan, key + pair * BLOCK, chunk)
            b = warp_mma.load_fragment(address, False)
            warp_mma.multiply(acc[None, 2 * pair], a, b[:2], "bf16")
            warp_mma.multiply(acc[None, 2 * pair + 1], a, b[2:], "bf16")
    row += lane // 4
    for tile in cutlass.range_constexpr(tiles):
        column = first_key + tile * 8 + (lane % 4) * 2
        for half in cutlass.range_constexpr(2):
            place = scratch.scores + score_offset(plan, part, row + 8 * half, column)
            store(place, Float32, (acc[2 * half, tile], acc[2 * half + 1, tile]))


@cute.jit
def score_offset(plan: PortablePlan, part: Int32, row: Int32, key: Int32) -> Int32:
    """Return the offset of a slice's score of a row and a key."""
    moved = key ^ ((row % 4) * TURNED_WORDS)
    return ((part * plan.rows + row) * KEYS + moved) * SCORE_BYTES


@cute.jit
def weigh(
    plan: PortablePlan,
    scratch: Scratch,
    exists: Int32,
    ends: cute.Tensor,
    first_key: Int32,
    scale_log2: Float32,
    state: State,
) -> None:
    """Turn the scores of this warp's rows into weights, and leave these and the factors of O.

    Args:
        plan, scratch, state: as above.
        exists: address of the marks of the tile's keys.
        ends: (rows of the warp,), keys that a row may see, of the tile's source.
        first_key: number of the tile's first key in its source.
        scale_log2: factor of scores in log2 units.
    """
    lane = cute.arch.lane_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    there = load(exists + lane * 4, Int32) != 0
    for index in cutlass.range_constexpr(plan.rows_of_warp):
        row = warp * plan.rows_of_warp + index
        total = load(scratch.scores + score_offset(plan, Int32(0), row, lane), Float32)
        for part in cutlass.range_constexpr(1, SLICES):
            total += load(scratch.scores + score_offset(plan, Int32(part), row, lane), Float32)
        sees = there & (first_key + lane < ends[index])
        value = total if sees else -Float32.inf
        top = value
        for distance in cutlass.range_constexpr(5):
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=1 << distance))
        older = state.row_max[index]
        newer = cute.arch.fmax(older, top)
        base = finite(newer)
        factor = cute.math.exp2((older - base) * scale_log2, fastmath=True)
        weight = cute.math.exp2((value - base) * scale_log2, fastmath=True)
        state.row_max[index] = newer
        state.row_sum[index] = state.row_sum[index] * factor + weight
        _store_weight(scratch.weights + row * P_ROW_BYTES + lane * 2, weight)
        if lane == 0:
            store(scratch.factors + row * 4, Float32, (factor,))


@cute.jit
def _store_weight(address: Int32, weight: Float32) -> None:
    """Store a weight in bf16."""
    cute.arch.inline_ptx(
        "{ .reg .b16 narrow; cvt.rn.bf16.f32 narrow, {$r1}; st.shared.b16 [{$r0}], narrow; }",
        read_only_args=[address, weight],
    )


@cute.jit
def accumulate(plan: PortablePlan, scratch: Scratch, keys: Int32, state: State) -> None:
    """Rescale O to the new maxima, and add P V of this warp's columns. keys: of the stage."""
    lane, o = cute.arch.lane_idx(), state.o
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    tiles = plan.columns_of_warp // 8
    weights = cute.make_rmem_tensor((4, KEYS // BLOCK, plan.row_blocks), Uint32)
    for block in cutlass.range_constexpr(plan.row_blocks):
        for half in cutlass.range_constexpr(2):
            row = block * BLOCK + lane // 4 + 8 * half
            factor = load(scratch.factors + row * 4, Float32)
            for tile in cutlass.range_constexpr(tiles):
                o[2 * half, tile, block] *= factor
                o[2 * half + 1, tile, block] *= factor
        for step in cutlass.range_constexpr(KEYS // BLOCK):
            row = block * BLOCK + lane % 16
            place = scratch.weights + row * P_ROW_BYTES + (step * 2 + lane // 16) * CHUNK
            a = warp_mma.load_fragment(place, False)
            for k in cutlass.range_constexpr(4):
                weights[k, step, block] = a[k]
    for step in cutlass.range_constexpr(KEYS // BLOCK):
        key = step * BLOCK + lane % 16
        for pair in cutlass.range_constexpr(tiles // 2):
            chunk = warp * tiles + 2 * pair + lane // 16
            b = warp_mma.load_fragment(keys + key_offset(plan, key, chunk), True)
            for block in cutlass.range_constexpr(plan.row_blocks):
                a = tuple(weights[k, step, block] for k in range(4))
                warp_mma.multiply(o[None, 2 * pair, block], a, b[:2], "bf16")
                warp_mma.multiply(o[None, 2 * pair + 1, block], a, b[2:], "bf16")
