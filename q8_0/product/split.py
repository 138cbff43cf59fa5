"""Interleaved weights: blocks of GGUF on their way to quants and scales (device code).

cp.async brings the chunks of 16 bytes in which two blocks of a row lie, 68 bytes. A stage later a
thread takes a block apart: 34 bytes that begin at a multiple of 2.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from kernelkit.device import shared_words
from kernelkit.device.warp_mma import pick
from q8_0.blocks import BLOCK_BYTES
from q8_0.product.config import (
    ALIGNED_BLOCKS,
    BLOCKS_OF_STAGE,
    CHUNK_BYTES,
    STAGE_K,
)
from q8_0.product.load import Loader
from q8_0.product.scope import Scope
from q8_0.product.words import copy_bytes, copy_whole, load_half, swizzle_of, widened

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
        """They come with the blocks."""

    def load_weight_scales(self, _scope: Scope, _step: Int32, _scales: None) -> None:
        """They come with the blocks."""

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
        """Where those of a step begin."""
        return (step & 1) * self.config.w_bytes
