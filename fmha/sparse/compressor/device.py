"""What compressors share (device code): where rows of a step and of a tail lie, and what follows
when a window is pooled: RMSNorm, RoPE, the record. `fmha.sparse.compressor.reference` defines them.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from fmha.sparse.compressor.config import VECTOR, EntryConfig
from fmha.sparse.indexer.entry import store_index_row
from fmha.sparse.indexer.formats import FORMATS, LANES, PIECE
from kernelkit.log2 import LOG2_E
from kernelkit.words import float_of, vector_at
from kvcache.layouts.latent import LATENTS, ROPE
from kvcache.movement.device import entry_of, load_bytes, place_of, store_bytes, zeros
from kvcache.movement.entry import Pieces, load_angles, places_of, rotated, rounded, store_piece


@dataclass(frozen=True)
class Numbers:
    """The table of a launch, see `fmha.sparse.compressor.forward`.

    source: addresses of values and scores, bytes between tokens of each, tokens. step: addresses
    of positions, owners, starts, cu_tokens, state_slots, ends, rows of the tail, entries. counts:
    ends, requests, rows saved of a request, clusters that have windows. tail: address,
    bytes between slots, rows, slots. weights: addresses of ape and weight, bytes between rows of
    ape, bits of eps. rope: as `load_angles` takes it. target: as `places_of` takes it, entries
    behind.
    """

    source: tuple
    step: tuple
    counts: tuple
    tail: tuple
    weights: tuple
    rope: tuple
    target: tuple


SIZES = (5, 8, 4, 4, 4, 5, 5)
NUMBERS = sum(SIZES)


def numbers_from(numbers: tuple) -> Numbers:
    """The numbers of the table in their groups."""
    parts, begin = [], 0
    for size in SIZES:
        parts.append(numbers[begin : begin + size])
        begin += size
    return Numbers(*parts)


@cute.jit
def index_at(table: Int64, index: Int32) -> Int32:
    """table[index] of int32."""
    return vector_at(table + Int64(index) * 4, Int32, 1)[0]


@cute.jit
def fused(a: Float32, b: Float32, c: Float32) -> Float32:
    """a * b + c, rounded once, wherever it is compiled."""
    return cute.arch.inline_ptx(
        "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Float32],
        read_only_args=[a, b, c],
    )


@cute.jit
def share_of(score: Float32, base: Float32) -> Float32:
    """exp(score - base)."""
    return cute.math.exp2((score - base) * LOG2_E, fastmath=True)


@cute.jit
def request_of(numbers: Numbers, request: Int32) -> tuple:
    """(its first token, tokens, position of the first) of a request of the step."""
    first = index_at(numbers.step[3], request)
    count = index_at(numbers.step[3], request + 1) - first
    return first, count, Int64(index_at(numbers.step[2], request))


@cute.jit
def tail_cell(
    config: cutlass.Constexpr[EntryConfig], numbers: Numbers, row: tuple, column: Int32
) -> tuple:
    """Addresses of values and scores from `column` on; row: (slot, row)."""
    row_bytes, (slot, inside) = config.columns * 4, row
    values = numbers.tail[0] + Int64(slot) * numbers.tail[1] + inside * row_bytes
    values += Int64(column) * 4
    return values, values + numbers.tail[2] * row_bytes


@cute.jit
def step_cell(numbers: Numbers, token: Int32, column: Int32) -> tuple:
    """Addresses of values and scores of a token from `column` on."""
    source, here = numbers.source, Int64(column) * 4
    return source[0] + Int64(token) * source[2] + here, source[1] + Int64(token) * source[3] + here


@cute.jit
def ape_at(
    config: cutlass.Constexpr[EntryConfig], numbers: Numbers, position: Int64, column: Int32
) -> cute.Tensor:
    """What is added to VECTOR scores of a token at `position`."""
    phase, ape = Int64(Uint32(position) % Uint32(config.ratio)), zeros(VECTOR, Float32)
    load_bytes(numbers.weights[0] + phase * numbers.weights[2] + Int64(column) * 4, ape)
    return ape


@cute.jit
def store_cell(
    config: cutlass.Constexpr[EntryConfig],
    numbers: Numbers,
    row: Int32,
    column: Int32,
    cell: tuple,
) -> None:
    """VECTOR values and scores of a token to a row of the tail; cell: (values, scores, ape)."""
    value, score, ape = cell
    for index in cutlass.range_constexpr(VECTOR):
        score[index] = score[index] + ape[index]
    targets = tail_cell(config, numbers, place_of(row, numbers.tail[2]), column)
    store_bytes(value, targets[0])
    store_bytes(score, targets[1])


@cute.jit
def save_cell(
    config: cutlass.Constexpr[EntryConfig], numbers: Numbers, place: tuple, column: Int32
) -> None:
    """VECTOR values and scores of a token to its row of the tail, if it has one.

    place: (token, its position).
    """
    token, position = place
    tail, known = numbers.tail, token >= 0 and token < Int32(numbers.source[4])
    row = Int32(-1)
    if known:
        row = entry_of(numbers.step[6], token, tail[2] * tail[3])
    if row >= 0:
        value, score = zeros(VECTOR, Float32), zeros(VECTOR, Float32)
        sources = step_cell(numbers, token, column)
        load_bytes(sources[0], value)
        load_bytes(sources[1], score)
        ape = ape_at(config, numbers, position, column)
        store_cell(config, numbers, row, column, (value, score, ape))


@cute.jit
def save_row(
    config: cutlass.Constexpr[EntryConfig], numbers: Numbers, item: Int32, mine: tuple
) -> None:
    """One of the last tokens of a request to its tail, but for what a window of this step reads
    from there: who reads it writes it.

    mine: (thread, threads) of a row. A row of a tail held position `before`: block b of its columns
    is of the window that is overlap - 1 - b windows behind its own.
    """
    saved, (thread, threads) = numbers.counts[2], mine
    request = Int32(Uint32(item) // Uint32(saved))
    if request < Int32(numbers.counts[1]):
        first, count, start = request_of(numbers, request)
        inside = count - 1 - (item - request * Int32(saved))
        if inside >= 0:
            ratio, rows, position = Uint32(config.ratio), Int32(numbers.tail[2]), start + inside
            before = start - 1 - Int64(Uint32(rows - 1 - inside % rows))
            vectors = config.columns // VECTOR
            for vector in cutlass.range(thread, vectors, threads, unroll=1):
                column, read = vector * VECTOR, Boolean(False)
                if before >= 0:
                    behind = config.overlap - 1 - Int32(Uint32(column) // Uint32(config.width))
                    window = Int32(Uint32(before) // ratio) + behind
                    end = Int64(window) * config.ratio + (config.ratio - 1)
                    read = end >= start and end < start + count
                if not read:
                    save_cell(config, numbers, (first + inside, position), column)


@cute.jit
def sum_of_squares(values: cute.Tensor, lanes: cutlass.Constexpr[int]) -> Float32:
    """Over `lanes` neighbouring lanes, a power of two, in all of them."""
    total = Float32(0.0)
    for index in cutlass.range_constexpr(cute.size(values)):
        total = fused(values[index], values[index], total)
    for step in (1, 2, 4, 8, 16):
        if cutlass.const_expr(step < lanes):
            total = total + cute.arch.shuffle_sync_bfly(total, step)
    return total


@cute.jit
def load_norm(
    config: cutlass.Constexpr[EntryConfig], numbers: Numbers, column: Int32, position: Int64
) -> tuple:
    """(weights of the RMSNorm, angles) of a lane that has VECTOR channels from `column` on, of an
    entry at `position`; of an index key the angles of the lane's elements in `_store_key`."""
    weight = zeros(VECTOR, Float32)
    load_bytes(numbers.weights[1] + Int64(column) * 4, weight)
    if cutlass.const_expr(config.indexed):
        pairs, inside, first = PIECE // 2, cute.arch.lane_idx() % LANES, LANES - ROPE // PIECE
        pair = (inside - first) * pairs
        return weight, load_angles(numbers.rope, position, pair, pairs, inside >= first)
    nope = LATENTS[config.record].nope
    pair, wanted = (column - nope) // 2, column >= nope
    return weight, load_angles(numbers.rope, position, pair, VECTOR // 2, wanted)


@cute.jit
def store_entry(
    static: cutlass.Constexpr[tuple],
    numbers: Numbers,
    values: cute.Tensor,
    norm: tuple,
    place: tuple,
    squares: Float32,
) -> None:
    """VECTOR pooled channels of every lane of a warp: normalised, rotated, quantised, stored.

    static: (EntryConfig, architecture). norm: see `load_norm`. place: (first channel of a lane,
    entry or -1). squares: the sum of all channels' squares.
    """
    config, (weight, angles), (column, entry) = static[0], norm, place
    mean = squares * Float32(1.0 / config.width) + float_of(Uint32(numbers.weights[3]))
    factor = cute.math.rsqrt(mean, fastmath=True)
    for index in cutlass.range_constexpr(VECTOR):
        values[index] = values[index] * factor * weight[index]
    if cutlass.const_expr(config.indexed):
        _store_key(static, numbers, values, angles, entry)
    else:
        latent = LATENTS[config.record]
        places = places_of(latent, numbers.target, entry)
        row = rounded(values), rotated(values, angles)
        store_piece(Pieces(latent, VECTOR), row, places, column, entry >= 0)


@cute.jit
def _store_key(
    static: cutlass.Constexpr[tuple],
    numbers: Numbers,
    values: cute.Tensor,
    angles: cute.Tensor,
    entry: Int32,
) -> None:
    """A warp has one key, 4 elements a lane; its lower half takes 8 a lane."""
    (config, arch), lane = static, cute.arch.lane_idx()
    piece = cute.make_rmem_tensor(PIECE, Float32)
    for index in cutlass.range_constexpr(PIECE):
        source = lane % LANES * 2 + index // VECTOR
        piece[index] = cute.arch.shuffle_sync(values[index % VECTOR], source)
    record, target = FORMATS[config.record].record, numbers.target
    slot, row = place_of(cutlass.max(entry, Int32(0)), target[3])
    data = target[0] + slot * target[2] + row * record.data_bytes
    scales = target[1] + slot * target[2] + row * record.scale_bytes
    exists = Boolean(entry >= 0 and lane < LANES)
    store_index_row(piece, angles, FORMATS[config.record], arch, (data, scales), exists)
