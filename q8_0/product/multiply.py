"""Products from shared memory to accumulators, and their store (device code).

For each element and block an mma gives u = OFFSET + I. Then t = u d_x - OFFSET d_x = I d_x, rounded
once since both products are exact, and y = t d_w + y.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from kernelkit.device import shared_words, warp_mma
from kernelkit.device.warp_mma import pack
from kernelkit.device.words import bits_of, vector_at
from q8_0.product.config import (
    APART,
    CHUNK_BYTES,
    MMA_ROWS,
    MMA_TOKENS,
    NEAR,
    OWN_ROWS,
    PAIRS,
    STAGE_K,
    ProductConfig,
)
from q8_0.product.tile import Scope, fused, multiply, store_words, swizzle_of

GROUP = 4  # fragments of rows in which a lane has eight neighbouring rows
GROUP_ROWS = GROUP * MMA_ROWS
# In which numbers t are made and added to y, by their place in a fragment.
ORDERS = {
    APART: ("t0", "t1", "t2", "y0", "t3", "y1", "y2", "y3"),
    NEAR: ("t0", "t2", "y0", "t1", "y2", "y1", "t3", "y3"),
}


@dataclass(frozen=True)
class Places:
    """Shared addresses of one lane in stage 0.

    x, w: addresses of quants of tokens and rows: of the plain chunk, and of the chunk whose index
        the swizzle XORs with 2. That XOR alternates between blocks, and between neighbouring
        fragments of tokens or pairs of fragments of rows.
    x_scale, w_scale: addresses of scales
    """

    x: tuple[Int32, Int32]
    w: tuple[Int32, Int32]
    x_scale: Int32
    w_scale: Int32


class Blocks:
    """Multiplication of blocks.

    Lane 4 g + i has the tokens 16 k + 8 h + g of a warp's tile. Its rows are 32 v + 8 i to 32 v + 8
    i + 7; fragment 4 v + k has 2 k and 2 k + 1 of these.
    """

    def __init__(self, config: ProductConfig) -> None:
        self.config = config
        self.token_tiles = config.warp_tokens // MMA_TOKENS
        self.row_tiles = config.warp_rows // MMA_ROWS

    @cute.jit
    def accumulator(self) -> cute.Tensor:
        """(4, fragments of rows, fragments of tokens), zeros."""
        acc = cute.make_rmem_tensor((4, self.row_tiles, self.token_tiles), Float32)
        acc.fill(0.0)
        return acc

    @cute.jit
    def places(self, smem: Int32) -> Places:
        """Return the calling lane's addresses; `smem` is the shared base address."""
        config, lane = self.config, cute.arch.lane_idx()
        token, row = self.origin()
        matrix, line = lane // 8, lane % 8
        own_token = token + matrix % 2 * 8 + line
        x = own_token * STAGE_K + (matrix // 2 ^ swizzle_of(own_token)) * CHUNK_BYTES
        own_row = row + line // 2 * 8 + matrix // 2 * 2 + line % 2
        w = own_row * STAGE_K + (matrix % 2 ^ swizzle_of(own_row)) * CHUNK_BYTES
        w = w + config.w_offset
        other = 2 * CHUNK_BYTES
        return Places(
            x=(smem + x, smem + (x ^ other)),
            w=(smem + w, smem + (w ^ other)),
            x_scale=smem + config.x_scale_offset + token * 8 + lane // 4 * 16,
            w_scale=smem + config.w_scale_offset + (row + lane % 4 * 8) * 4,
        )

    @cute.jit
    def origin(self) -> tuple[Int32, Int32]:
        """First token and row of the warp in the CTA's tile."""
        config = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        token = warp % config.warps_of_tokens * config.warp_tokens
        return token, warp // config.warps_of_tokens * config.warp_rows

    @cute.jit
    def places_of(self, places: Places, quants: tuple[Int32, Int32], step: Int32) -> Places:
        """Return the addresses in the stage of a step.

        `quants` are the offsets of quants of tokens and rows in their rings.
        """
        config = self.config
        half = (step & 1) * config.scale_bytes
        return Places(
            x=(places.x[0] + quants[0], places.x[1] + quants[0]),
            w=(places.w[0] + quants[1], places.w[1] + quants[1]),
            x_scale=places.x_scale + half,
            w_scale=places.w_scale + half,
        )

    @cute.jit
    def multiply_block(
        self,
        block: cutlass.Constexpr[int],
        places: Places,
        acc: cute.Tensor,
    ) -> None:
        """Add one block of a stage. places: in the stage."""
        xs, ws = places.x, places.w
        x_scale = places.x_scale + block * self.config.x_scale_bytes
        w_scale = places.w_scale + block * self.config.w_scale_bytes
        a, token_scales = [], []
        for tile in cutlass.range_constexpr(self.token_tiles):
            at = xs[(block ^ tile) & 1] + tile * (MMA_TOKENS * STAGE_K)
            a.append(warp_mma.load_fragment(at, False))
            token_scales.append(shared_words.load(x_scale + tile * (MMA_TOKENS * 8), Float32, 4))
        for pair in cutlass.range_constexpr(self.row_tiles // 2):
            group, inside = pair * 2 // GROUP, pair * 2 % GROUP
            at = ws[(block ^ pair) & 1] + (group * GROUP_ROWS + inside * 2) * STAGE_K
            b = warp_mma.load_fragment(at, False)
            at = w_scale + (group * GROUP_ROWS + inside * 2) * 4
            row_scales = shared_words.load(at, Float32, 4)
            for index in cutlass.range_constexpr(2):
                for tile in cutlass.range_constexpr(self.token_tiles):
                    u = multiply(a[tile], b[2 * index : 2 * index + 2])
                    own = row_scales[2 * index : 2 * index + 2]
                    self.add(u, token_scales[tile], own, acc[None, pair * 2 + index, tile])

    @cute.jit
    def add(
        self,
        u: tuple[Float32, ...],
        token_scales: tuple[Float32, ...],
        row_scales: tuple[Float32, ...],
        acc: cute.Tensor,
    ) -> None:
        """acc (4,) += what `multiply` found.

        The order is for ptxas, which follows it: with more numbers t at a time it spills, with
        fewer it waits for each.
        """
        if cutlass.const_expr(self.config.adding == PAIRS):
            self.add_pairs(u, token_scales, row_scales, acc)
        else:
            t: list[Float32 | None] = [None] * 4
            for step in ORDERS[self.config.adding]:
                k = int(step[1])
                if cutlass.const_expr(step[0] == "t"):
                    t[k] = fused(u[k], token_scales[k // 2 * 2], token_scales[k // 2 * 2 + 1])
                else:
                    acc[k] = fused(t[k], row_scales[k % 2], acc[k])

    @cute.jit
    def add_pairs(
        self,
        u: tuple[Float32, ...],
        token_scales: tuple[Float32, ...],
        row_scales: tuple[Float32, ...],
        acc: cute.Tensor,
    ) -> None:
        """Scale and add, two rows at a time."""
        for k in cutlass.range_constexpr(0, 4, 2):
            scale, back = token_scales[k : k + 2]
            t = cute.arch.fma_packed_f32x2(u[k : k + 2], (scale, scale), (back, back))
            own = (acc[k], acc[k + 1])
            acc[k], acc[k + 1] = cute.arch.fma_packed_f32x2(t, row_scales, own)


# ---- From accumulators to the result

TYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "fp32": Float32}


class Store:
    """Store of accumulators to the result."""

    def __init__(self, config: ProductConfig, blocks: Blocks) -> None:
        self.config, self.blocks = config, blocks
        self.width = TYPES[config.out_dtype].width // 8

    @cute.jit
    def run(self, scope: Scope, acc: cute.Tensor) -> None:
        """Write the tokens and rows that are there and that no other tile writes."""
        blocks, tile, params = self.blocks, scope.tile, scope.params
        lane = cute.arch.lane_idx()
        if cutlass.const_expr(self.config.bias):
            self.add_bias(scope, acc)
        token, row = blocks.origin()
        token = tile.token + token + lane // 4
        row = tile.row + row + lane % 4 * OWN_ROWS
        for index in cutlass.range_constexpr(blocks.token_tiles * 2):
            at_token = token + index // 2 * MMA_TOKENS + index % 2 * 8
            wanted = at_token >= tile.first_token and at_token < Int32(params.x.rows)
            start = params.out + Int64(at_token) * params.out_stride
            for group in cutlass.range_constexpr(blocks.row_tiles // GROUP):
                values = []
                for k in cutlass.range_constexpr(OWN_ROWS):
                    values.append(acc[self.place(index, group, k)])
                if wanted:
                    self.store(scope, start, row + group * GROUP_ROWS, values)

    @cute.jit
    def add_bias(self, scope: Scope, acc: cute.Tensor) -> None:
        """acc += that of each row, all tokens of a row at a time, so that few are in registers."""
        config, blocks, params = self.config, self.blocks, scope.params
        _, row = blocks.origin()
        row = scope.tile.row + row + cute.arch.lane_idx() % 4 * OWN_ROWS
        for group in cutlass.range_constexpr(blocks.row_tiles // GROUP):
            for k in cutlass.range_constexpr(OWN_ROWS):
                own = row + group * GROUP_ROWS + k
                if cutlass.const_expr(config.small):
                    own = cutlass.min(own, Int32(params.w.quants.rows) - 1)
                address = params.bias + Int64(own) * self.width
                added = vector_at(address, TYPES[config.out_dtype], 1)[0].to(Float32)
                for index in cutlass.range_constexpr(blocks.token_tiles * 2):
                    place = self.place(index, group, k)
                    acc[place] = acc[place] + added

    def place(self, index: int, group: int, k: int) -> tuple[int, int, int]:
        """Index in the accumulators of the lane's token `index` and its row k of a group."""
        return index % 2 * 2 + k % 2, group * GROUP + k // 2, index // 2

    @cute.jit
    def store(self, scope: Scope, start: Int64, row: Int32, values: list[Float32]) -> None:
        """Eight neighbours of the result's row that begins at an address."""
        config = self.config
        address = start + Int64(row) * self.width
        if cutlass.const_expr(config.vector):
            words, wanted = self.words(values), self.is_wanted(scope, row)
            if wanted:  # all eight are, or none
                for first in cutlass.range_constexpr(0, len(words), 4):
                    store_words(address + first * 4, tuple(words[first : first + 4]))
        else:
            dtype = TYPES[config.out_dtype]
            for k in cutlass.range_constexpr(OWN_ROWS):
                gOut, value = vector_at(address + k * self.width, dtype, 1), dtype(values[k])
                wanted = self.is_wanted(scope, row + k)
                if wanted:
                    gOut[0] = value

    def is_wanted(self, scope: Scope, row: Int32) -> Boolean:
        """Whether this tile writes a row of the weights."""
        return (row >= scope.tile.first_row) & (row < Int32(scope.params.w.quants.rows))

    def words(self, values: list[Float32]) -> list[Uint32]:
        """Convert values to 32-bit words of the result's dtype."""
        if self.config.out_dtype == "fp32":
            return [bits_of(value) for value in values]
        pairs = zip(values[::2], values[1::2], strict=True)
        return [pack(low, high, self.config.out_dtype) for low, high in pairs]
