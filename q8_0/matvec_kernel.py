"""A few tokens times the weights, each of which is read once, in fp32 (device code).

y[t, m] = sum over pieces of d * (sum over the piece of q * x).
With activations in Q8_1 y is the sum of (d d') * (sum of q q'), whose inner sum is exact. A lane
adds up its pieces in the order of their columns. Then lanes add to each other, then the warps that
share rows. `choose.matvec_config` partitions the work; `reference.matvec` defines the result.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from kernelkit.device.device_table import DeviceTable
from kernelkit.device.table_kernel import TableKernel
from kernelkit.device.words import fused, vector_at
from kernelkit.plan.hw import WARP_THREADS
from q8_0.blocks import BLOCK, SCALE_BYTES
from q8_0.config import INTEGERS, ITEMSIZE, PIECE, VECTOR_BYTES, BatchConfig, MatvecConfig
from q8_0.device import (
    TYPES,
    Piece,
    dot,
    fetch,
    integer_dot,
    load_scale,
    load_words,
    numbers_of,
    product,
    quant_floats,
    row_of,
    scale_float,
)
from q8_0.params import MatvecParams

WORDS = PIECE // 4


@dataclass(frozen=True)
class Numbers:
    """16 numbers of a token as they are in memory, and their scale if they are integers."""

    words: list[Uint32]
    scale: Float32 | None


class Matvec(TableKernel):
    """The kernel of one MatvecConfig; table: `MatvecParams`."""

    config: MatvecConfig

    def __init__(self, config: MatvecConfig | BatchConfig) -> None:
        super().__init__(config)
        self.fewest_ctas = int(config.dtype == "fp32")

    @cute.kernel
    def kernel(self, table: DeviceTable) -> None:
        """A CTA has `config.cta_rows` rows."""
        config, params = self.config, table.unpack(MatvecParams)
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        sSums = SmemAllocator().allocate_tensor(
            Float32, cute.make_layout((config.warps, config.sums), stride=(config.sums, 1))
        )
        warp, lane = thread // WARP_THREADS, thread % WARP_THREADS
        first = cta * config.cta_rows + warp // config.splits * config.rows
        rows, last = [], Int32(params.weights.rows) - 1
        for row in cutlass.range_constexpr(config.rows):
            rows.append(row_of(params.weights, cutlass.min(first + row, last)))
        acc = cute.make_rmem_tensor(config.sums, Float32)
        acc.fill(0.0)
        pieces = Int32(params.weights.cols) // PIECE
        step = WARP_THREADS * config.unrolled
        begin = warp % config.splits * step
        for base in cutlass.range(begin, pieces, step * config.splits, unroll=1):
            loaded = []
            for turn in cutlass.range_constexpr(config.unrolled):
                exists = base + turn * WARP_THREADS + lane < pieces
                further = turn * WARP_THREADS * PIECE // BLOCK
                for row in rows:
                    loaded.append(fetch(config.layout, WORDS, row, base + lane, exists, further))
            # The barrier keeps loads before it, and the branch, which is always taken,
            # keeps sums after it: otherwise ptxas starts sums before all loads are issued.
            cute.arch.sync_warp()
            if Int32(params.tokens) + base > 0:
                for turn in cutlass.range_constexpr(config.unrolled):
                    piece = base + turn * WARP_THREADS + lane
                    mine = loaded[turn * config.rows : (turn + 1) * config.rows]
                    self.absorb(params, mine, piece, piece < pieces, acc)
        self.share(acc, sSums, warp, lane)
        cute.arch.sync_threads()
        self.store(params, sSums, cta, thread)

    @cute.jit
    def load_x(self, params: MatvecParams, token: Int64, piece: Int32, exists: Boolean) -> Numbers:
        """A piece of a token."""
        config = self.config
        size = PIECE * ITEMSIZE[config.dtype]
        address = params.x + token * params.x_stride + Int64(piece) * size
        words, scale = load_words(address, size // VECTOR_BYTES, exists), None
        if cutlass.const_expr(config.dtype == INTEGERS):
            place = params.x_scales + token * params.x_scale_stride
            scale = load_scale(place + Int64(piece // (BLOCK // PIECE)) * SCALE_BYTES, exists)
        return Numbers(words, scale)

    @cute.jit
    def absorb(
        self,
        params: MatvecParams,
        loaded: list[Piece],
        piece: Int32,
        exists: Boolean,
        acc: cute.Tensor,
    ) -> None:
        """A piece of each row times that of each token, added to acc."""
        config = self.config
        quants, scales = [], []
        for row in cutlass.range_constexpr(config.rows):
            words = loaded[row].words
            if cutlass.const_expr(config.dtype == INTEGERS):
                quants.append(words)
            else:
                quants.append(quant_floats(words))
            scales.append(scale_float(loaded[row].scale))
        last = Int32(params.tokens) - 1
        for token in cutlass.range_constexpr(config.tokens):
            x = self.load_x(params, Int64(cutlass.min(Int32(token), last)), piece, exists)
            if cutlass.const_expr(config.dtype != INTEGERS):
                numbers = numbers_of(x.words, config.dtype)
            for row in cutlass.range_constexpr(config.rows):
                index = row * config.tokens + token
                if cutlass.const_expr(config.dtype == INTEGERS):
                    both = product(scales[row], x.scale)
                    acc[index] = fused(both, integer_dot(quants[row], x.words), acc[index])
                else:
                    acc[index] = fused(scales[row], dot(quants[row], numbers), acc[index])

    @cute.jit
    def share(self, acc: cute.Tensor, sSums: cute.Tensor, warp: Int32, lane: Int32) -> None:
        """The sums over all lanes, to shared memory.

        Lanes swap halves: each time a lane keeps every sum of one half of what it has and gives the
        other half away, until it has few; lanes that then have the same add up.
        """
        values = [acc[index] for index in range(self.config.sums)]
        place = Int32(0)
        for bit in cutlass.range_constexpr(5):
            upper = (lane >> bit & 1) != 0
            if cutlass.const_expr(len(values) > 1):
                half = len(values) // 2
                place += half * (lane >> bit & 1)
                kept = []
                for index in cutlass.range_constexpr(half):
                    low, high = values[index], values[index + half]
                    given = low if upper else high
                    mine = high if upper else low
                    kept.append(mine + cute.arch.shuffle_sync_bfly(given, 1 << bit))
                values = kept
            else:
                values = [values[0] + cute.arch.shuffle_sync_bfly(values[0], 1 << bit)]
        if lane < self.config.sums:
            for index in cutlass.range_constexpr(len(values)):
                sSums[warp, place + index] = values[index]

    @cute.jit
    def store(self, params: MatvecParams, sSums: cute.Tensor, cta: Int32, thread: Int32) -> None:
        """The sums over the warps that share a row, in their order, to the result."""
        config = self.config
        dtype, size = TYPES[config.out], ITEMSIZE[config.out]
        for index in cutlass.range(
            thread, config.cta_rows * config.tokens, config.threads, unroll=1
        ):
            token, mine = index // config.cta_rows, index % config.cta_rows
            row = cta * config.cta_rows + mine
            if token < params.tokens and row < params.weights.rows:
                warp = mine // config.rows * config.splits
                place = mine % config.rows * config.tokens + token
                total = sSums[warp, place]
                for split in cutlass.range_constexpr(1, config.splits):
                    total += sSums[warp + split, place]
                if cutlass.const_expr(config.bias):
                    total += vector_at(params.bias + Int64(row) * size, dtype, 1)[0].to(Float32)
                address = params.out + Int64(token) * params.out_stride + Int64(row) * size
                gOut = vector_at(address, dtype, 1)
                gOut[0] = total.to(dtype)


def host_function(config: MatvecConfig, _arch: str) -> tuple:
    """Return the function to compile for `config`, and example arguments."""
    return Matvec(config).with_table(MatvecParams)
