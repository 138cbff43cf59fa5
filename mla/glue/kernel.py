"""The kernel: a warp takes a row of one of the parts at a time (device code).

Parts with longer rows come first. Which part a warp has is the same for all of its lanes.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint8, Uint32

from kernelkit.compile.arch import written_for
from kernelkit.device.dependent import follow
from kernelkit.device.device_table import DeviceTable
from kernelkit.device.narrow import inverse_of as inverse_of_scale
from kernelkit.device.narrow import packed_elements
from kernelkit.device.table_kernel import TableKernel
from kernelkit.device.words import vector_at
from kernelkit.plan.hw import WARP_THREADS
from kvcache.layouts.latent import ROPE
from kvcache.movement.config import PIECE
from kvcache.movement.device import (
    EntryAddress,
    checked_entry,
    entry_address,
    int32_at,
    int64_at,
    store_bytes,
    store_word,
)
from kvcache.movement.entry import (
    Pieces,
    inverse_of,
    load_pairs,
    rounded,
    scale_code,
    store_piece,
    turned,
    widened,
)
from mla.attention.formats import LATENT
from mla.glue.config import (
    INDEX_ROWS,
    PIECED,
    STEP,
    GlueConfig,
    GlueParams,
    KeyWords,
    LowRankWords,
)
from mla.glue.norms import (
    add_squares,
    centre,
    factor_of,
    load_row,
    load_weight,
    scale,
    scale_and_shift,
    sum_over,
)
from mla.indexer.entry import load_row_angles, row_address, store_index_row
from mla.indexer.formats import FORMATS, LANES, WIDTH

NORMED = LATENT // STEP  # pieces of a lane that the norm of a key covers
ROPE_PIECES = ROPE // PIECE


class Glue(TableKernel):
    """The kernel of one GlueConfig; table: `GlueParams`."""

    config: GlueConfig

    def __init__(self, config: GlueConfig, arch: str) -> None:
        super().__init__(config)
        self.pdl = config.pdl
        # The conversions that a kernel may use: those of sm_100a, or those that all have.
        self.arch = "sm_100a" if written_for(arch) == "sm_100a" else "sm_90a"

    @cute.kernel
    def kernel(self, table: DeviceTable) -> None:
        """CTAs divide the rows of all parts."""
        config, params = self.config, table.unpack(GlueParams)
        if cutlass.const_expr(config.pdl):
            follow()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        self.run_cta(params, cta, ctas)

    @cute.jit
    def run_cta(self, params: GlueParams, cta: Int32, ctas: Int32) -> None:
        """Process the rows of CTA number `cta` of `ctas`; its warps take turns at them."""
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        first = cta * config.warps + thread // WARP_THREADS
        for item in cutlass.range(first, Int32(params.items), ctas * config.warps, unroll=1):
            self.take(params, item, thread % WARP_THREADS)

    @cute.jit
    def take(self, params: GlueParams, item: Int32, lane: Int32) -> None:
        """Find the part that has this turn, and do it."""
        config, tokens = self.config, Int32(params.tokens)
        begin = Int32(0)
        if cutlass.const_expr(config.low_rank is not None):
            if item < tokens:
                self.low_rank_row(params.low_rank, item, lane)
            begin = begin + tokens
        if cutlass.const_expr(config.keys is not None):
            if item >= begin and item < begin + tokens:
                self.key_row(params, item - begin, lane)
            begin = begin + tokens
        if cutlass.const_expr(config.index is not None):
            turns = (tokens + INDEX_ROWS - 1) // INDEX_ROWS
            if item >= begin and item < begin + turns:
                self.index_rows(params, item - begin, lane)
            begin = begin + turns
        if cutlass.const_expr(config.queries is not None):
            if item >= begin:
                self.query_rows(params, item - begin, lane)

    @cute.jit
    def position_of(self, params: GlueParams, token: Int32) -> Int64:
        """The position of a token."""
        if cutlass.const_expr(self.config.wide_positions):
            return int64_at(params.positions, token)
        return Int64(int32_at(params.positions, token))

    @cute.jit
    def low_rank_row(self, words: LowRankWords, token: Int32, lane: Int32) -> None:
        """Normalise a low-rank query."""
        config = self.config.low_rank
        address = words.x.address + Int64(token) * words.x.stride
        target = words.out.address + Int64(token) * words.out.stride
        row = load_row(address, config.pieces, config.last_lanes, lane)
        squares = Float32(0.0)
        for piece in cutlass.range_constexpr(config.pieces):
            squares = add_squares(squares, widened(row[piece]))
        factor = factor_of(sum_over(squares, WARP_THREADS), config.width, words.norm.eps_bits)
        for piece in cutlass.range_constexpr(config.pieces):
            if piece < config.pieces - 1 or lane < config.last_lanes:
                values, place = widened(row[piece]), piece * WARP_THREADS + lane
                scale(values, factor, words.norm, config.weight, place)
                store_bytes(rounded(values), target + place * (PIECE * 2))

    @cute.jit
    def key_row(self, params: GlueParams, token: Int32, lane: Int32) -> None:
        """Normalise, rotate and store a latent key."""
        config, keys = self.config.keys, params.keys
        address = keys.x.address + Int64(token) * keys.x.stride
        row = load_row(address, config.pieces, config.last_lanes, lane)
        entry = slot_at(keys.slots, token, config.wide_slots, keys.entries.count)
        is_rope = Boolean(lane >= config.rope_lane and lane < config.last_lanes)
        position = self.position_of(params, token)
        piece = lane - config.rope_lane
        angles = load_pairs(params.angles, position, piece, config.pairs, is_rope)
        values, squares = [widened(words) for words in row], Float32(0.0)
        for piece in cutlass.range_constexpr(NORMED):
            squares = add_squares(squares, values[piece])
        factor = factor_of(sum_over(squares, WARP_THREADS), LATENT, keys.norm.eps_bits)
        for piece in cutlass.range_constexpr(NORMED):
            place = piece * WARP_THREADS + lane
            scale(values[piece], factor, keys.norm, config.weight, place)
        values[-1] = turned(values[-1], angles, config.pairs, is_rope)
        entries = [rounded(each) for each in values]
        target = entry_address(config.stored, keys.entries, entry)
        if cutlass.const_expr(config.record in PIECED):
            self.store_pieces(entries, target, entry >= 0, lane)
        else:
            self.store_codes(keys, entries, target, entry >= 0, lane)

    @cute.jit
    def store_pieces(
        self, row: list[cute.Tensor], target: EntryAddress, exists: Boolean, lane: Int32
    ) -> None:
        """Store a key in bf16, two elements to a word, as a record with RoPE in bf16."""
        config = self.config.keys
        latent = PIECED[config.record]
        for piece in cutlass.range_constexpr(config.pieces):
            is_last, is_there = piece == config.pieces - 1, exists
            if cutlass.const_expr(is_last):
                is_there = exists and lane < config.last_lanes
            pieces = Pieces(latent, PIECE, not is_last or config.rope_lane > 0, is_last)
            column = (piece * WARP_THREADS + lane) * PIECE
            other = row[piece] if is_last else None
            store_piece(pieces, row[piece], other, target, column, is_there)

    @cute.jit
    def store_codes(
        self,
        keys: KeyWords,
        row: list[cute.Tensor],
        target: EntryAddress,
        exists: Boolean,
        lane: Int32,
    ) -> None:
        """Store a key in bf16, two elements to a word, as a record that is e4m3 throughout."""
        config = self.config.keys
        group = config.form.group
        inverse = Float32(1.0)
        if cutlass.const_expr(config.scaled):
            inverse = inverse_of_scale(vector_at(keys.scale, Float32, 1))
        for piece in cutlass.range_constexpr(config.pieces):
            values, column = widened(row[piece]), (piece * WARP_THREADS + lane) * PIECE
            is_there = exists
            if cutlass.const_expr(piece == config.pieces - 1):
                is_there = exists and lane < config.last_lanes
            if cutlass.const_expr(group > 0):
                code = scale_code(values, group // PIECE)
                inverse = inverse_of(code)
                if is_there and lane % (group // PIECE) == 0:
                    store_word(Uint8(code), target.scales + column // group)
            elements = packed_elements(values, inverse, "e4m3", "sm_90a")
            if is_there:
                store_bytes(elements, target.data + column)

    @cute.jit
    def index_rows(self, params: GlueParams, turn: Int32, lane: Int32) -> None:
        """Normalise, rotate, transform and store INDEX_ROWS keys of the indexer."""
        config, index = self.config.index, params.index
        form, place = FORMATS[config.record], lane % LANES
        last = Int32(params.tokens) - 1
        token = turn * INDEX_ROWS + lane // LANES
        is_there = token <= last
        token = cutlass.min(token, last)
        row = load_row(index.x.address + Int64(token) * index.x.stride, 1, WARP_THREADS, place)
        entry = slot_at(index.slots, token, config.wide_slots, index.entries.count)
        angles = load_row_angles(params.angles, self.position_of(params, token), config.rotation)
        values = widened(row[0])
        centre(values, WIDTH, LANES)
        squares = sum_over(add_squares(Float32(0.0), values), LANES)
        factor = factor_of(squares, WIDTH, index.norm.eps_bits)
        weight = load_weight(index.norm.weight, config.weight, place)
        scale_and_shift(values, factor, weight, load_weight(index.bias, config.weight, place))
        target = entry_address(form.record, index.entries, entry)
        exists = Boolean(is_there and entry >= 0)
        store_index_row(values, angles, form, self.arch, target, exists, config.rotation)

    @cute.jit
    def query_rows(self, params: GlueParams, turn: Int32, lane: Int32) -> None:
        """Rotate the last 64 elements of ROPE_ROWS heads, or normalise and rotate a head."""
        config, queries = self.config.queries, params.queries
        lanes = WARP_THREADS if config.normed else ROPE_PIECES
        heads, place = Uint32(queries.heads), lane % lanes
        count = Int32(params.tokens) * Int32(queries.heads)
        number = turn * (WARP_THREADS // lanes) + lane // lanes
        exists, number = number < count, Uint32(cutlass.min(number, count - 1))
        token = number // heads
        head = number - token * heads
        pieces = NORMED if config.normed else 1
        row = load_row(row_address(queries.x, token, head), pieces, WARP_THREADS, place)
        is_rope = Boolean(lane >= WARP_THREADS - ROPE_PIECES) if config.normed else Boolean(True)
        position = self.position_of(params, Int32(token))
        piece = lane % ROPE_PIECES
        angles = load_pairs(params.angles, position, piece, config.pairs, is_rope)
        values = [widened(words) for words in row]
        if cutlass.const_expr(config.normed):
            squares = Float32(0.0)
            for index in cutlass.range_constexpr(pieces):
                squares = add_squares(squares, values[index])
            factor = factor_of(sum_over(squares, WARP_THREADS), LATENT, queries.eps_bits)
            for index in cutlass.range_constexpr(pieces):
                for element in cutlass.range_constexpr(PIECE):
                    values[index][element] = values[index][element] * factor
        values[-1] = turned(values[-1], angles, config.pairs, is_rope)
        target = row_address(queries.out, token, head)
        if exists:
            for index in cutlass.range_constexpr(pieces):
                address = target + (index * WARP_THREADS + place) * (PIECE * 2)
                store_bytes(rounded(values[index]), address)


@cute.jit
def slot_at(slots: Int64, token: Int32, wide: cutlass.Constexpr[bool], entries: Int64) -> Int32:
    """The entry of a token, -1 where the cache does not have it."""
    if cutlass.const_expr(wide):
        return checked_entry(int64_at(slots, token), entries)
    return checked_entry(Int64(int32_at(slots, token)), entries)


def host_function(config: GlueConfig, arch: str) -> tuple:
    """Return the function to compile for `config`, and example arguments."""
    return Glue(config, arch).with_table(GlueParams)
