"""Scores of index keys with mma.sync in 16 bits, for every record (device code).

The warp that multiplies a key loads it from its page to registers, one tile ahead, and dequantises
it there; a quad of lanes holds a row, see `scores_config`. Queries lie in shared memory, as
fragments. Reading order: scores_config.py, scores_device.py, this file.

Elements of a record are widened to 16 bits exactly. A lane's elements of a row become the words of
its mma.sync fragments: step s of K uses words 4 s to 4 s + 3, two for each of its MMAs. Their order
along K is arbitrary, since keys and queries share it.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint8, Uint32
from cutlass.memory import SmemAllocator

from kernelkit.device import warp_mma
from kernelkit.device.device_table import DeviceTable
from kernelkit.device.param_table import ParamTable
from kernelkit.device.words import float_of, vector_at
from kernelkit.plan import hw
from kvcache.movement.device import load_bytes, zeros
from kvcache.movement.reference import SCALE_BIAS
from mla.indexer.entry import row_address
from mla.indexer.formats import index_format
from mla.indexer.params import ScoresParams
from mla.indexer.scores_config import (
    CHUNK_BYTES,
    HEADS_OF_MMA,
    KEYS,
    LANE_WORDS,
    STEPS,
    WARP_KEYS,
    WarpConfig,
)
from mla.indexer.scores_device import (
    Run,
    most_of,
    note_spans,
    relu,
    run_from,
    slot_of,
    store_score,
)

DTYPES = {"e2m1": "bf16", "e4m3": "fp16", "bf16": "bf16"}  # they hold every number of the element
SIGNS, MAGNITUDES = 0x80008000, 0x01C001C0  # of two e2m1, at bf16 bits
# With exponent bits e, an e2m1 number is 2^126 times the bf16 number of the same bits: 2^(e - 1)
# against 2^(e - 127), also for the subnormal e = 0. The factor times the scale is in range up to
# this code, 2^1.
REBIAS, LARGEST_CODE = 126, 128
BF16_MANTISSA = 7
NAN_BITS, NAN_CODE = 0x7FC0, 0xFF


@cute.jit
def words_of(raw: cute.Tensor, scale: Uint32, element: cutlass.Constexpr[str]) -> cute.Tensor:
    """Return the words of a lane's elements of a row, widened to 16 bits.

    scale: exponent byte of e2m1; other elements ignore it.
    """
    words = cute.make_rmem_tensor(LANE_WORDS, Uint32)
    if cutlass.const_expr(element == "bf16"):
        words.store(raw.load())
    elif cutlass.const_expr(element == "e4m3"):
        for index in cutlass.range_constexpr(LANE_WORDS // 2):
            pair = warp_mma.widen(raw[index], DTYPES[element])
            words[2 * index], words[2 * index + 1] = pair
    else:
        factor = twice((cutlass.min(scale, Uint32(LARGEST_CODE)) + REBIAS) << BF16_MANTISSA)
        for index in cutlass.range_constexpr(LANE_WORDS):
            words[index] = times(e2m1_pair(raw[index // 4], index % 4), factor)
        if scale > LARGEST_CODE:  # rare
            bits = (scale - (LARGEST_CODE - SCALE_BIAS)) << BF16_MANTISSA
            factor = twice(Uint32(NAN_BITS) if scale == NAN_CODE else bits)
            for index in cutlass.range_constexpr(LANE_WORDS):
                words[index] = times(words[index], factor)
    return words


@cute.jit
def e2m1_pair(word: Uint32, index: cutlass.Constexpr[int]) -> Uint32:
    """Return elements `index` and `index` + 4 of the eight in a word, times 2^-126."""
    signs, magnitudes = word << (12 - 4 * index), word
    if cutlass.const_expr(index < 2):
        magnitudes = word << (6 - 4 * index)
    else:
        magnitudes = word >> (4 * index - 6)
    return (signs & Uint32(SIGNS)) | (magnitudes & Uint32(MAGNITUDES))


@cute.jit
def twice(bits: Uint32) -> Uint32:
    """Return a word with a bf16 in both halves."""
    return bits | (bits << 16)


@cute.jit
def times(x: Uint32, y: Uint32) -> Uint32:
    """Return two products of bf16. No operand may be an immediate."""
    return cute.arch.inline_ptx(
        "mul.rn.bf16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[x, y]
    )


ROWS = 4  # rows of a warp's keys of which a lane has parts: 8 k + g
CHUNK_WORDS = CHUNK_BYTES // 4


@dataclass(frozen=True)
class Held:
    """Shared memory of a CTA."""

    queries: cute.Tensor  # words (4, lane, step, head tile of all tokens)
    weights: cute.Tensor  # fp32 (heads of all tokens)
    spans: cute.Tensor  # int32 (tokens + 1, 2)


class WarpScores:
    """Host function and kernel of one WarpConfig."""

    def __init__(self, config: WarpConfig) -> None:
        self.config = config
        self.form = index_format(config.record)

    @cute.jit
    def __call__(self, table: ParamTable, ctas: Int32, groups: Int32, stream: CUstream) -> None:
        """Launch the kernel.

        Args:
            table: `ScoresParams`.
            ctas: number of CTAs that share the tiles of keys.
            groups: number of groups of tokens.
            stream: CUDA stream.
        """
        self.kernel(table).launch(
            grid=(groups, ctas, 1),
            block=(self.config.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=self.config.ctas_per_sm,  # bounds the registers of a thread
            preferred_smem_carveout=100,  # percent of what an SM has
        )

    @cute.kernel
    def kernel(self, table: DeviceTable) -> None:
        """Compute the scores, run by run and tile by tile."""
        config, params = self.config, table.unpack(ScoresParams)
        group, cta, _ = cute.arch.block_idx()
        first = group * config.tokens
        held = self.allocate()
        note_spans(params, held.spans, first)
        cute.arch.sync_threads()
        if cta * KEYS < most_of(held.spans):  # otherwise this CTA has no tile
            begin = Int32(0)
            while begin < config.tokens:
                run = run_from(held.spans, begin)
                raw, scales = self.room()
                self.load_keys(params, run, cta, raw, scales)
                if begin == 0:  # loads of the first keys are in flight
                    self.load_queries(params, held, first)
                    cute.arch.sync_threads()
                begin = run.end
                self.walk(params, held, run, first, raw, scales)

    @cute.jit
    def walk(
        self,
        params: ScoresParams,
        held: Held,
        run: Run,
        first: Int32,
        raw: cute.Tensor,
        scales: cute.Tensor,
    ) -> None:
        """Compute the scores of the CTA's tiles of a run.

        Args:
            first: the CTA's first token.
            raw, scales: the first tile; later tiles are loaded into them.
        """
        cta, ctas = cute.arch.block_idx()[1], cute.arch.grid_dim()[1]
        for tile in cutlass.range(cta, (run.most + KEYS - 1) // KEYS, ctas, unroll=1):
            words = self.widened(raw, scales)
            key_scale = self.key_scale(scales)
            self.load_keys(params, run, tile + ctas, raw, scales)
            for token in cutlass.range(run.begin, run.end, unroll=1):
                value = sum_of_quad(self.products(held, token, words)) * key_scale
                key = tile * KEYS + own_key()
                exists = key < held.spans[token, 1]
                store_score(params, first + token, key, value, exists, self.config.out)

    def allocate(self) -> Held:
        """Allocate the shared memory that `Held` describes."""
        config = self.config
        smem = SmemAllocator().allocate(config.smem_bytes, byte_alignment=128)
        tiles = config.tokens * config.head_tiles
        lanes = cute.make_layout((4, hw.WARP_THREADS, STEPS, tiles))
        spans = cute.make_layout((config.tokens + 1, 2), stride=(2, 1))
        return Held(
            cute.make_tensor(cute.recast_ptr(smem.align(16), dtype=Uint32), lanes),
            self.tensor(smem, config.weights_offset, Float32, cute.make_layout(config.columns)),
            self.tensor(smem, config.spans_offset, Int32, spans),
        )

    def tensor(self, smem: cute.Pointer, offset: int, dtype: Any, layout: Any) -> cute.Tensor:
        """Return a tensor of `dtype` and `layout` in shared memory."""
        return cute.make_tensor(cute.recast_ptr((smem + offset).align(8), dtype=dtype), layout)

    @cute.jit
    def load_queries(self, params: ScoresParams, held: Held, first: Int32) -> None:
        """Write the queries of the CTA's tokens as fragments, and their weights, to shared memory.

        Tokens that do not exist become zeros.
        """
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        lane, warps = thread % hw.WARP_THREADS, config.threads // hw.WARP_THREADS
        tiles = config.tokens * config.head_tiles
        for tile in cutlass.range(thread // hw.WARP_THREADS, tiles, warps, unroll=1):
            token = Int64(first + tile // config.head_tiles)
            head = Int64(tile % config.head_tiles * HEADS_OF_MMA + lane // 4)
            raw, code = zeros(config.row_bytes // 16), zeros(1, Uint8)
            if token < params.tokens:
                self.load_row(row_address(params.q, token, head), raw)
                if cutlass.const_expr(self.form.element == "e2m1"):
                    q_scales = params.q_scales
                    scales = token * q_scales.token_stride + head * q_scales.head_stride
                    load_bytes(q_scales.address + scales + lane % 4, code)
            words = words_of(raw, Uint32(code[0]), self.form.element)
            for step in cutlass.range_constexpr(STEPS):
                part = cute.local_tile(words, (4,), (step,))
                cute.autovec_copy(part, held.queries[None, lane, step, tile])
        for column in cutlass.range(thread, config.columns, config.threads, unroll=1):
            token, weight = Int64(first + column // config.heads), Float32(0.0)
            if token < params.tokens:
                row = params.weights + token * params.weights_stride
                weight = vector_at(row + Int64(column % config.heads) * 4, Float32, 1)[0]
            held.weights[column] = weight

    def room(self) -> tuple[cute.Tensor, cute.Tensor]:
        """Allocate registers for a lane's parts of rows and for their scales.

        The scales of e2m1 are the exponent byte of each row; those of e4m3 are one fp32, of the row
        whose score the lane stores.
        """
        words = cute.make_layout((self.config.row_bytes // 16, ROWS))
        raw = cute.make_rmem_tensor(words, Uint32)
        raw.fill(0)
        if self.form.element == "e4m3":
            return raw, zeros(1)
        return raw, zeros(ROWS, Uint8)

    @cute.jit
    def load_keys(
        self, params: ScoresParams, run: Run, tile: Int32, raw: cute.Tensor, scales: cute.Tensor
    ) -> None:
        """Load the keys of a tile; zeros for those that the run does not see."""
        lane, rows = cute.arch.lane_idx(), Uint32(params.rows)
        begin = Uint32(tile * KEYS + warp_of_cta() * WARP_KEYS)
        block, row = begin // rows, begin % rows
        for k in cutlass.range_constexpr(ROWS):
            key, slot = Int32(begin) + 8 * k + lane // 4, Int32(-1)
            if key < run.most:
                slot = slot_of(params, run.owner, Int32(block))
            if slot >= 0:
                own = Int64(row) + lane // 4
                place = Int64(slot) * params.slot_stride
                self.load_row(params.data + place + own * self.config.row_bytes, raw[None, k])
                scale = params.scales + place + own * 4
                if cutlass.const_expr(self.form.element == "e2m1"):
                    code = cute.make_tensor(scales.iterator + k, cute.make_layout(1))
                    load_bytes(scale + lane % 4, code)
                if cutlass.const_expr(self.form.element == "e4m3"):
                    if lane % 4 == k:
                        load_bytes(scale, scales)
            else:
                raw[None, k].fill(0)
            # Eight rows always lie in one block: both begin at multiples of 8.
            row += 8
            block, row = (block, row) if row < rows else (block + 1, Uint32(0))

    @cute.jit
    def load_row(self, row: Int64, raw: cute.Tensor) -> None:
        """Load the lane's chunks of the row at address `row`."""
        for chunk in cutlass.range_constexpr(self.config.chunks):
            place = row + (chunk * 4 + cute.arch.lane_idx() % 4) * CHUNK_BYTES
            part = cute.local_tile(raw, (CHUNK_WORDS,), (chunk,))
            cute.autovec_copy(vector_at(place, Uint32, CHUNK_WORDS), part)

    def widened(self, raw: cute.Tensor, scales: cute.Tensor) -> list:
        """Return the words of each row, widened to 16 bits."""
        codes = [scales[k] if self.form.element == "e2m1" else 0 for k in range(ROWS)]
        return [words_of(raw[None, k], Uint32(codes[k]), self.form.element) for k in range(ROWS)]

    def key_scale(self, scales: cute.Tensor) -> Float32:
        """Return the scale of the lane's key."""
        return float_of(scales[0]) if self.form.element == "e4m3" else Float32(1.0)

    @cute.jit
    def products(self, held: Held, token: Int32, words: list) -> cute.Tensor:
        """Return, for each row of the lane, the weighted sum of products in the lane's columns."""
        config, lane, dtype = self.config, cute.arch.lane_idx(), DTYPES[self.form.element]
        sums = cute.make_rmem_tensor(ROWS, Float32)
        sums.fill(0.0)
        for index in cutlass.range(config.head_tiles, unroll=2):
            tile = token * config.head_tiles + index
            acc = cute.make_rmem_tensor((4, ROWS // 2), Float32)
            acc.fill(0.0)
            for step in cutlass.range_constexpr(STEPS):
                b = cute.make_rmem_tensor(4, Uint32)
                cute.autovec_copy(held.queries[None, lane, step, tile], b)
                for part in cutlass.range_constexpr(2):
                    low = 4 * step + 2 * part
                    for half in cutlass.range_constexpr(ROWS // 2):
                        upper, lower = words[2 * half], words[2 * half + 1]
                        a = (upper[low], lower[low], upper[low + 1], lower[low + 1])
                        column = (b[2 * part], b[2 * part + 1])
                        warp_mma.multiply(acc[None, half], a, column, dtype)
            column = tile * HEADS_OF_MMA + lane % 4 * 2
            for side in cutlass.range_constexpr(2):
                weight = held.weights[column + side]
                for k in cutlass.range_constexpr(ROWS):
                    sums[k] += weight * relu(acc[k % 2 * 2 + side, k // 2])
        return sums


def warp_of_cta() -> Int32:
    """Return the warp index of the calling thread."""
    return cute.arch.make_warp_uniform(cute.arch.warp_idx())


def own_key() -> Int32:
    """Return the key of a tile whose score this lane stores: row i of its quad."""
    lane = cute.arch.lane_idx()
    return warp_of_cta() * WARP_KEYS + lane % 4 * 8 + lane // 4


@cute.jit
def sum_of_quad(sums: cute.Tensor) -> Float32:
    """Sum over the four lanes of a quad; lane i gets the sum of row i."""
    lane = cute.arch.lane_idx()
    upper, odd = lane % 4 >= 2, lane % 2 == 1
    pair = cute.make_rmem_tensor(2, Float32)
    for index in cutlass.range_constexpr(2):
        kept = sums[2 + index] if upper else sums[index]
        sent = sums[index] if upper else sums[2 + index]
        pair[index] = kept + cute.arch.shuffle_sync_bfly(sent, offset=2)
    kept, sent = (pair[1], pair[0]) if odd else (pair[0], pair[1])
    return kept + cute.arch.shuffle_sync_bfly(sent, offset=1)


def host_function(config: WarpConfig, _arch: str) -> tuple:
    """Return the function to compile for `config`, and example arguments."""
    return WarpScores(config), ParamTable.zeros(ScoresParams), Int32(1), Int32(1), CUstream(0)
