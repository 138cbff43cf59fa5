"""2 to 16 tokens times the weights on tensor cores (device code): `mma.sync`, as every GPU has it.

y[t, m] = sum over blocks of d * (sum over the block of q * x), the inner sum by the tensor cores in
fp32, or in Q8_1 exactly, times d d'. The order of columns within a block does not matter to a
product, so that a lane takes 8 neighbouring ones of it: 4 i .. are the bytes 8 i .. there, of
weights and of x alike, and nothing has to be exchanged between lanes.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from kernelkit.device.device_table import DeviceTable
from kernelkit.device.param_table import ParamTable
from kernelkit.device.warp_mma import multiply
from kernelkit.device.words import fused
from kernelkit.plan.hw import WARP_THREADS
from q8_0.blocks import BLOCK, SCALE_BYTES
from q8_0.config import INTEGERS, ITEMSIZE, RESIDENT_WARPS, BatchConfig
from q8_0.device import (
    Piece,
    fetch,
    load_scale,
    load_words,
    multiply_integers,
    product,
    quant_halves,
    row_of,
    scale_float,
)
from q8_0.matvec_kernel import Matvec
from q8_0.params import MatvecParams

MINE = BLOCK // 4  # columns of a lane in a block
WORDS = MINE // 4


@dataclass(frozen=True)
class Numbers:
    """A lane's part of one block for a tile of 8 tokens, and two scales for Q8_1 tokens."""

    words: list[Uint32]
    scales: list[Float32]


class Batch(Matvec):
    """The kernel of one BatchConfig; table: `MatvecParams`. Lane t = 4 g + i has rows g and g + 8
    of its warp, and of x token g; of the results tokens 2 i and 2 i + 1 of those rows."""

    config: BatchConfig

    @cute.jit
    def __call__(self, table: ParamTable, ctas: Int32, stream: CUstream) -> None:
        """Launch `ctas` CTAs, of which ptxas leaves room for all that an SM shall hold."""
        self.kernel(table).launch(
            grid=(ctas, 1, 1),
            block=(self.config.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=RESIDENT_WARPS // self.config.warps,
            preferred_smem_carveout=25,  # percent of what an SM has; the rest holds x
        )

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
        first = cta * config.cta_rows + warp // config.splits * config.rows + lane // 4
        rows, last = [], Int32(params.weights.rows) - 1
        for half in cutlass.range_constexpr(2):
            rows.append(row_of(params.weights, cutlass.min(first + 8 * half, last)))
        acc = cute.make_rmem_tensor((4, config.tiles), Float32)
        acc.fill(0.0)
        blocks = Int32(params.weights.cols) // BLOCK
        begin = warp % config.splits * config.unrolled
        for base in cutlass.range(begin, blocks, config.unrolled * config.splits, unroll=1):
            loaded, numbers = [], []
            for turn in cutlass.range_constexpr(config.unrolled):
                piece, exists = base * 4 + lane % 4, base + turn < blocks
                for row in rows:
                    loaded.append(fetch(config.layout, WORDS, row, piece, exists, turn))
            if cutlass.const_expr(config.ahead):
                for turn in cutlass.range_constexpr(config.unrolled):
                    for tile in cutlass.range_constexpr(config.tiles):
                        numbers.append(self.load_tile(params, base, turn, tile))
            cute.arch.sync_warp()  # as in `matvec_kernel`: first all loads, then products
            for part in cutlass.range_constexpr(config.parts):
                # Other numbers, or it would be one branch.
                if Int32((params.tokens, params.weights.rows)[part]) + base > 0:
                    for turn in cutlass.range_constexpr(*config.turns(part)):
                        for tile in cutlass.range_constexpr(config.tiles):
                            if cutlass.const_expr(config.ahead):
                                x = numbers[turn * config.tiles + tile]
                            else:
                                x = self.load_tile(params, base, turn, tile)
                            self.absorb_tile(loaded[2 * turn : 2 * turn + 2], x, acc[None, tile])
        for tile in cutlass.range_constexpr(config.tiles):
            for index in cutlass.range_constexpr(4):
                row, token = lane // 4 + 8 * (index // 2), 8 * tile + lane % 4 * 2 + index % 2
                sSums[warp, row * config.tokens + token] = acc[index, tile]
        cute.arch.sync_threads()
        self.store(params, sSums, cta, thread)

    @cute.jit
    def load_tile(
        self,
        params: MatvecParams,
        base: Int32,
        turn: cutlass.Constexpr[int],
        tile: cutlass.Constexpr[int],
    ) -> Numbers:
        """Load the lane's part of block base + turn for 8 tokens; zeros after the last block. In
        Q8_1 also load the scales of the two tokens whose results the lane holds."""
        config = self.config
        lane, last = cute.arch.lane_idx(), Int32(params.tokens) - 1
        exists = base + turn < Int32(params.weights.cols) // BLOCK
        size = MINE * ITEMSIZE[config.dtype]
        token = Int64(cutlass.min(lane // 4 + 8 * tile, last))
        place = params.x + token * params.x_stride + Int64(base * 4 + lane % 4) * size
        words, scales = load_words(place + turn * 4 * size, 1, exists, size // 4), []
        if cutlass.const_expr(config.dtype == INTEGERS):
            for index in cutlass.range_constexpr(2):
                token = Int64(cutlass.min(8 * tile + lane % 4 * 2 + index, last))
                place = params.x_scales + token * params.x_scale_stride
                place = place + Int64(base) * SCALE_BYTES + turn * SCALE_BYTES
                scales.append(load_scale(place, exists))
        return Numbers(words, scales)

    @cute.jit
    def absorb_tile(self, loaded: list[Piece], x: Numbers, acc: cute.Tensor) -> None:
        """A block of 16 rows times that of 8 tokens, added to acc (4,)."""
        scales = [scale_float(piece.scale) for piece in loaded]
        if cutlass.const_expr(self.config.dtype == INTEGERS):
            words = [loaded[half].words[k] for k in range(2) for half in range(2)]
            sums = multiply_integers(words, x.words)
            for index in cutlass.range_constexpr(4):
                both = product(scales[index // 2], x.scales[index % 2])
                acc[index] = fused(both, sums[index], acc[index])
        else:
            found = cute.make_rmem_tensor(4, Float32)
            found.fill(0.0)
            for k in cutlass.range_constexpr(WORDS):
                low = [quant_halves(loaded[half].words[k], self.config.dtype) for half in range(2)]
                a = (low[0][0], low[1][0], low[0][1], low[1][1])
                multiply(found, a, (x.words[2 * k], x.words[2 * k + 1]), self.config.dtype)
            for index in cutlass.range_constexpr(4):
                acc[index] = fused(scales[index // 2], found[index], acc[index])


def host_function(config: BatchConfig, _arch: str) -> tuple:
    """Return the function to compile for `config`, and example arguments."""
    return Batch(config).with_table(MatvecParams)
