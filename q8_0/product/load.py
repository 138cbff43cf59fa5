"""Copies from global to shared memory: quants by cp.async, scales through registers (device code).

A stage of a ring has 64 bytes of each row, its chunks where `tile.swizzle_of` puts them. Scales are
converted to fp32 on the way. Those of tokens become (scale, -OFFSET scale), in the order in which
the lanes of a fragment read them; those of rows are stored in order.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint16, Uint32, Uint64

from kernelkit.device import shared_words
from kernelkit.device.warp_mma import pick
from kernelkit.device.words import vector_at
from q8_0.blocks import BLOCK, BLOCK_BYTES, SCALE_BYTES
from q8_0.product.config import (
    ALIGNED_BLOCKS,
    BLOCKS_OF_STAGE,
    CHUNK_BYTES,
    CHUNKS,
    STAGE_K,
    ProductConfig,
)
from q8_0.product.params import Matrix
from q8_0.product.tile import OFFSET, Scope, copy_bytes, copy_whole, load_half, swizzle_of, widened


@dataclass(frozen=True)
class Scales:
    """Scales of one thread.

    words: one stage, two fp16 for each of its rows
    addresses: global addresses of the words
    """

    words: cute.Tensor
    addresses: cute.Tensor


class Loader:
    """The ways of a ProductConfig that both layouts of weights share."""

    def __init__(self, config: ProductConfig) -> None:
        self.config = config

    @cute.jit
    def token_rows(self, scope: Scope) -> cute.Tensor:
        """Return the addresses of the calling thread's first chunks of the tile's tokens."""
        return self.rows_of(scope, scope.params.x, scope.tile.token)

    @cute.jit
    def rows_of(self, scope: Scope, matrix: Matrix, first: Int32) -> cute.Tensor:
        """(1,) Address of the thread's first chunk of rows from `first` on, in the first stage; in
        small tiles, where rows are clamped, that of its column of the row `first`."""
        thread, _, _ = cute.arch.thread_idx()
        stride, row = scope.blocks * BLOCK, Int32(0)
        if cutlass.const_expr(not self.config.small):
            row = thread // CHUNKS
        address = cute.make_rmem_tensor(1, Int64)
        address[0] = (
            matrix.address + Int64(first + row) * stride + Int64(thread % CHUNKS * CHUNK_BYTES)
        )
        return address

    @cute.jit
    def copy_tokens(self, scope: Scope, step: Int32, slot: Int32, rows: cute.Tensor) -> None:
        """Begin to copy quants of the tile's tokens. rows: see `copy_rows`."""
        config, tile = self.config, scope.tile
        last = Int32(scope.params.x.rows) - 1 - tile.token
        target = scope.smem + slot * config.x_bytes
        self.copy_rows(scope, rows, (config.tile_tokens, last), target, step)

    @cute.jit
    def copy_rows(
        self,
        scope: Scope,
        rows: cute.Tensor,
        counts: tuple[int, Int32],
        target: Int32,
        step: Int32,
    ) -> None:
        """Begin to copy a stage, with zeros after the end of K.

        Args:
            scope: the tile
            rows: addresses from `rows_of`, moved to this stage
            counts: number of rows of the tile, and the last row that exists
            target: shared address of the stage
            step: number of the stage in K
        """
        config, (count, last) = self.config, counts
        thread, _, _ = cute.arch.thread_idx()
        at_once = config.threads // CHUNKS
        row, chunk = thread // CHUNKS, thread % CHUNKS
        target = target + row * STAGE_K + (chunk ^ swizzle_of(row)) * CHUNK_BYTES
        source, stride, valid = rows[0], Uint32(scope.blocks * BLOCK), Int32(CHUNK_BYTES)
        if cutlass.const_expr(not config.even):
            there = step * BLOCKS_OF_STAGE + chunk * CHUNK_BYTES // BLOCK < scope.blocks
            valid = valid if there else Int32(0)
            source = source if there else source - BLOCK  # whose bytes exist
        for begin in cutlass.range_constexpr(0, count, at_once):
            place, further = target + begin * STAGE_K, Uint32(begin)
            if cutlass.const_expr(config.small):
                further = Uint32(cutlass.min(row + begin, last))
            if begin + at_once <= count or begin + row < count:
                # One instruction, a product of 32 bits each to which 64 are added.
                at = source + Int64(Uint64(stride) * Uint64(further))
                if cutlass.const_expr(config.even):
                    copy_whole(place, at)
                else:
                    copy_bytes(place, at, valid)

    @cute.jit
    def scales_of(
        self, scope: Scope, matrix: Matrix, first: Int32, count: cutlass.Constexpr[int]
    ) -> Scales:
        """Address scales of the rows thread, thread + threads, ... of `count`, from the first
        block."""
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        own = -(-count // config.threads)
        words, addresses = cute.make_rmem_tensor(own, Uint32), cute.make_rmem_tensor(own, Int64)
        words.fill(0)
        for k in cutlass.range_constexpr(own):
            row = thread + k * config.threads
            if cutlass.const_expr((k + 1) * config.threads > count):
                row = cutlass.min(row, Int32(count - 1))  # of threads that store none
            if cutlass.const_expr(config.small):
                row = cutlass.min(row, Int32(matrix.rows) - 1 - first)
            stride = scope.blocks * SCALE_BYTES
            addresses[k] = matrix.address + Int64(first + row) * stride
        return Scales(words, addresses)

    @cute.jit
    def load_scales(self, scope: Scope, step: Int32, scales: Scales) -> None:
        """Load the scales of a step; zeros after the end of K."""
        for k in cutlass.range_constexpr(cute.size(scales.words)):
            at = scales.addresses[k]
            if cutlass.const_expr(self.config.even):
                scales.words[k] = vector_at(at, Uint32, 1)[0]
            else:
                word = Uint32(vector_at(at, Uint16, 1)[0])
                if step * BLOCKS_OF_STAGE + 1 < scope.blocks:
                    word = word | Uint32(vector_at(at + SCALE_BYTES, Uint16, 1)[0]) << 16
                scales.words[k] = word

    @cute.jit
    def move_on(self, addresses: cute.Tensor, nbytes: cutlass.Constexpr[int]) -> None:
        """Advance addresses to the next stage."""
        for k in cutlass.range_constexpr(cute.size(addresses)):
            addresses[k] = addresses[k] + nbytes

    @cute.jit
    def token_scales(self, scope: Scope) -> Scales:
        """Address the scales of the tile's tokens."""
        config = self.config
        return self.scales_of(scope, scope.params.x_scales, scope.tile.token, config.tile_tokens)

    @cute.jit
    def store_token_scales(self, scope: Scope, step: Int32, scales: Scales) -> None:
        """Store the scales from `load_scales` to the half of this step."""
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        half = config.x_scale_offset + (step & 1) * config.scale_bytes
        for k in cutlass.range_constexpr(cute.size(scales.words)):
            token = thread + k * config.threads
            place = scope.smem + half + token_place(token)
            if (k + 1) * config.threads <= config.tile_tokens or token < config.tile_tokens:
                found = widened(scales.words[k])
                for block in cutlass.range_constexpr(BLOCKS_OF_STAGE):
                    pair = (found[block], found[block] * Float32(-OFFSET))
                    shared_words.store(place + block * config.x_scale_bytes, Float32, pair)


def token_place(token: Int32) -> Int32:
    """Offset in bytes of a token's pair among those of a block. The two rows of a fragment that a
    lane has are adjacent."""
    return token // 16 * 128 + token % 8 * 16 + token // 8 % 2 * 8


class SoaLoader(Loader):
    """Weights whose quants and scales are apart."""

    @cute.jit
    def weight_rows(self, scope: Scope) -> cute.Tensor:
        """Return the addresses of the calling thread's first chunks of the tile's rows."""
        return self.rows_of(scope, scope.params.w.quants, scope.tile.row)

    @cute.jit
    def copy_weights(self, scope: Scope, step: Int32, slot: Int32, rows: cute.Tensor) -> None:
        """Begin to copy quants of the tile's rows. rows: see `copy_rows`."""
        config, tile = self.config, scope.tile
        last = Int32(scope.params.w.quants.rows) - 1 - tile.row
        target = scope.smem + config.w_offset + slot * config.w_bytes
        self.copy_rows(scope, rows, (config.tile_rows, last), target, step)

    @cute.jit
    def weight_scales(self, scope: Scope) -> Scales:
        """Address the scales of the tile's rows."""
        config = self.config
        return self.scales_of(scope, scope.params.w.scales, scope.tile.row, config.tile_rows)

    @cute.jit
    def load_weight_scales(self, scope: Scope, step: Int32, scales: Scales) -> None:
        """Load the scales of weights of a step with `load_scales`."""
        self.load_scales(scope, step, scales)

    @cute.jit
    def finish_weights(self, scope: Scope, step: Int32, _slot: Int32, scales: Scales) -> None:
        """Store the scales from `load_weight_scales` to the half of this step."""
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        half = config.w_scale_offset + (step & 1) * config.scale_bytes
        for k in cutlass.range_constexpr(cute.size(scales.words)):
            row = thread + k * config.threads
            place = scope.smem + half + row * 4
            if (k + 1) * config.threads <= config.tile_rows or row < config.tile_rows:
                found = widened(scales.words[k])
                for block in cutlass.range_constexpr(BLOCKS_OF_STAGE):
                    at = place + block * config.w_scale_bytes
                    shared_words.store(at, Float32, (found[block],))

    def quants(self, _step: Int32, slot: Int32) -> Int32:
        """Offset of the quants of a step in their ring: stage `slot`."""
        return slot * self.config.w_bytes


# ---- Interleaved weights: blocks of GGUF on their way to quants and scales
#
# cp.async copies the 16-byte chunks that contain two blocks of a row (68 bytes). A stage later a
# thread splits a block: 34 bytes that begin at a multiple of 2.

STAGE_BYTES = BLOCKS_OF_STAGE * BLOCK_BYTES
STAGES_OF_TURN = ALIGNED_BLOCKS // BLOCKS_OF_STAGE
TURN_BYTES = ALIGNED_BLOCKS * BLOCK_BYTES
WORDS = 8  # of the quants of a block
SECOND_CHUNK = 2  # the second block begins two words into this one, counted as the first one does


class SplittingLoader(Loader):
    """Weights as in a file of GGUF."""

    def weight_rows(self, _scope: Scope) -> None:
        """Addresses of blocks are made anew for each stage."""

    @cute.jit
    def copy_weights(self, scope: Scope, step: Int32, slot: Int32, _rows: None) -> None:
        """Begin to copy the chunks of the tile's rows."""
        config = self.config
        weights, first = scope.params.w, scope.tile.row
        thread, _, _ = cute.arch.thread_idx()
        target = scope.smem + config.raw_offset + slot * config.raw_bytes
        tasks = config.tile_rows * config.raw_chunks
        for begin in cutlass.range_constexpr(0, tasks, config.threads):
            task = begin + thread
            row, chunk = task // config.raw_chunks, task % config.raw_chunks
            place = target + task * CHUNK_BYTES
            if cutlass.const_expr(config.small):
                row = cutlass.min(row, Int32(weights.quants.rows) - 1 - first)
            source = weights.quants.address + Int64(first + row) * weights.stride
            if begin + config.threads <= tasks or task < tasks:
                if cutlass.const_expr(config.aligned):
                    inside = step // STAGES_OF_TURN * TURN_BYTES + step % STAGES_OF_TURN * STAGE_K
                    copy_whole(place, source + inside + chunk * CHUNK_BYTES)
                else:
                    source = (source + Int64(step) * STAGE_BYTES) & Int64(-CHUNK_BYTES)
                    self.copy_existing(scope, place, source + chunk * CHUNK_BYTES)

    @cute.jit
    def copy_existing(self, scope: Scope, place: Int32, source: Int64) -> None:
        """A chunk, zeros behind the end of the weights."""
        end = scope.params.w.end
        valid = Int32(cutlass.max(cutlass.min(end - source, Int64(CHUNK_BYTES)), Int64(0)))
        copy_bytes(place, source if valid > 0 else end & Int64(-CHUNK_BYTES), valid)

    def weight_scales(self, _scope: Scope) -> None:
        """Do nothing: scales come with the blocks."""

    def load_weight_scales(self, _scope: Scope, _step: Int32, _scales: None) -> None:
        """Do nothing: scales come with the blocks."""

    @cute.jit
    def finish_weights(self, scope: Scope, step: Int32, slot: Int32, _scales: None) -> None:
        """Take the blocks of a step apart, which are in `slot` of the ring."""
        config = self.config
        raw = scope.smem + config.raw_offset + slot * config.raw_bytes
        tasks = config.tile_rows * BLOCKS_OF_STAGE
        if cutlass.const_expr(config.aligned):
            self.split_aligned(scope, step, raw)
        else:
            for begin in cutlass.range_constexpr(0, tasks, config.threads):
                row, block = self.task(begin)
                self.split_anywhere(scope, step, (row, block), raw)

    @cute.jit
    def task(self, begin: cutlass.Constexpr[int]) -> tuple[Int32, Int32]:
        """Row and block of the calling thread, in its turn from task `begin` on."""
        config = self.config
        task = begin + cute.arch.thread_idx()[0]
        return task % config.tile_rows, task // config.tile_rows

    @cute.jit
    def split_aligned(self, scope: Scope, step: Int32, raw: Int32) -> None:
        """The first scale begins at word step % 4, the second one in the middle of word 8 + that.

        All blocks of a thread are loaded before the first one is stored.
        """
        config, tasks = self.config, []
        for begin in cutlass.range_constexpr(0, config.tile_rows * BLOCKS_OF_STAGE, config.threads):
            row, block = self.task(begin)
            at = raw + (row * config.raw_chunks + block * SECOND_CHUNK) * CHUNK_BYTES
            loaded = []
            for k in cutlass.range_constexpr(3):
                loaded.extend(shared_words.load(at + k * CHUNK_BYTES, Uint32, 4))
            tasks.append((row, block, loaded))
        for turn in cutlass.range_constexpr(STAGES_OF_TURN):
            if step % STAGES_OF_TURN == turn:
                for row, block, loaded in tasks:
                    words = loaded[turn : turn + WORDS + 1]
                    scale = words[0] if block == 0 else words[0] >> 16
                    selector = Int32(0x5432) if block == 0 else Int32(0x7654)
                    quants = [pick(words[k], words[k + 1], selector) for k in range(WORDS)]
                    self.store(scope, step, (row, block), (quants, scale))

    @cute.jit
    def split_anywhere(
        self, scope: Scope, step: Int32, task: tuple[Int32, Int32], raw: Int32
    ) -> None:
        """Two bytes at a time, from where the block begins in its chunks."""
        row, block = task
        config, weights, tile = self.config, scope.params.w, scope.tile
        existing = row
        if cutlass.const_expr(config.small):
            existing = cutlass.min(row, Int32(weights.quants.rows) - 1 - tile.row)
        start = weights.quants.address + Int64(tile.row + existing) * weights.stride
        start = start + Int64(step) * STAGE_BYTES
        at = (
            raw
            + row * (config.raw_chunks * CHUNK_BYTES)
            + (Int32(start) & (CHUNK_BYTES - 1))
            + block * BLOCK_BYTES
        )
        halves = [load_half(at + 2 * k) for k in range(2 * WORDS + 1)]
        quants = [halves[1 + 2 * k] | halves[2 + 2 * k] << 16 for k in range(WORDS)]
        scale = halves[0]
        if step * BLOCKS_OF_STAGE + block >= scope.blocks:
            scale = Uint32(0)
        self.store(scope, step, task, (quants, scale))

    @cute.jit
    def store(
        self, scope: Scope, step: Int32, task: tuple[Int32, Int32], parts: tuple[list, Uint32]
    ) -> None:
        """parts: words of quants, and a word whose low half is the scale."""
        config, (row, block), (quants, scale) = self.config, task, parts
        place = scope.smem + config.w_offset + self.quants(step, Int32(0)) + row * STAGE_K
        for k in cutlass.range_constexpr(2):
            at = place + ((block * 2 + k) ^ swizzle_of(row)) * CHUNK_BYTES
            shared_words.store(at, Uint32, tuple(quants[4 * k : 4 * k + 4]))
        half = config.w_scale_offset + (step & 1) * config.scale_bytes
        at = scope.smem + half + block * config.w_scale_bytes + row * 4
        shared_words.store(at, Float32, (widened(scale)[0],))

    def quants(self, step: Int32, _slot: Int32) -> Int32:
        """Offset of the quants of a step: one of two halves."""
        return (step & 1) * self.config.w_bytes
