"""From accumulators to the result (device code)."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from kernelkit.device.warp_mma import pack
from kernelkit.device.words import bits_of, vector_at
from q8_0.product.blocks import GROUP, GROUP_ROWS, Blocks
from q8_0.product.config import MMA_TOKENS, OWN_ROWS, ProductConfig
from q8_0.product.scope import Scope
from q8_0.product.words import store_words

TYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "fp32": Float32}


class Store:
    """Of a ProductConfig."""

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
        """Of the lane's token number `index` and its row k of a group, in the accumulators."""
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
        """As they are in memory."""
        if self.config.out_dtype == "fp32":
            return [bits_of(value) for value in values]
        pairs = zip(values[::2], values[1::2], strict=True)
        return [pack(low, high, self.config.out_dtype) for low, high in pairs]
