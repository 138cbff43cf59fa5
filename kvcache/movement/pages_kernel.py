"""Heads of tokens to rows of pages, or back, K and V at once (device code)."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernelkit.device.device_table import DeviceTable
from kernelkit.device.narrow import packed_elements
from kernelkit.device.table_kernel import TableKernel
from kernelkit.device.words import vector_at
from kvcache.movement.config import PAGES_VECTORS, PagePair, PagesConfig, PagesParams
from kvcache.movement.device import (
    entry_of,
    load_bytes,
    slot_row,
    store_bytes,
    vector_type,
    zeros,
)
from kvcache.movement.entry import widened

# The number by which elements are multiplied, rounded to nearest.
INVERSE = "div.rn.f32 {$w0}, 0f3F800000, {$r0};"
HALVES = (
    "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; cvt.f32.f16 {$w0}, low; "
    "cvt.f32.f16 {$w1}, high; }"
)


@dataclass(frozen=True)
class Where:
    """Location of a token: its row among tokens, its page and its row of the page.

    A token without entry has page and row of entry 0, and `exists` is False.
    """

    token: Int32
    page: Int64
    row: Int64
    exists: cutlass.Boolean


class MovePages(TableKernel):
    """The kernel of one PagesConfig; table: `PagesParams`."""

    config: PagesConfig

    @cute.kernel
    def kernel(self, table: DeviceTable) -> None:
        """Groups of `lanes` threads take turns at the tokens; a lane has vectors of all heads."""
        config, params = self.config, table.unpack(PagesParams)
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        mine = cta * config.rows + thread // config.lanes
        pairs = (params.k, params.v)
        factors = (self.factor(params.k), self.factor(params.v))
        widest = cutlass.max(Int32(params.k.vectors), Int32(params.v.vectors))
        for token in cutlass.range(mine, Int32(params.tokens), ctas * config.rows, unroll=1):
            entry = entry_of(params.slots, token, params.entries)
            if config.gathered or entry >= 0:
                place = slot_row(cutlass.max(entry, Int32(0)), params.rows)
                where = Where(token, place.slot, place.row, entry >= 0)
                last = Int32(params.heads) * widest
                for unit in cutlass.range(
                    thread % config.lanes, last, config.lanes * PAGES_VECTORS, unroll=1
                ):
                    loaded = []
                    for pair in pairs:
                        loaded.append(self.load(pair, where, unit, widest, last))
                    for index in cutlass.range_constexpr(len(pairs)):
                        moved = loaded[index], factors[index]
                        self.store(moved, pairs[index], where, unit, widest, last)

    @cute.jit
    def factor(self, pair: PagePair) -> Float32:
        """Return the factor that multiplies an element before it becomes e4m3."""
        if cutlass.const_expr(not self.config.scaled):
            return Float32(1.0)
        return cute.arch.inline_ptx(
            INVERSE,
            write_only_types=[Float32],
            read_only_args=[vector_at(pair.scale, Float32, 1)[0]],
        )

    @cute.jit
    def load(
        self, pair: PagePair, where: Where, first: Int32, widest: Int32, last: Int32
    ) -> list[cute.Tensor]:
        """Vectors of a token from `first` on, zeros where there is no entry."""
        config = self.config
        dtype, size = vector_type(config.vector)
        found = []
        for index in cutlass.range_constexpr(PAGES_VECTORS):
            unit, words = first + index * config.lanes, zeros(size, dtype)
            head, vector = unit // widest, unit % widest
            if where.exists and unit < last and vector < Int32(pair.vectors):
                address = self.address(pair, where, head, of_pages=config.gathered)
                load_bytes(address + Int64(vector) * config.vector, words)
            found.append(words)
        return found

    @cute.jit
    def store(
        self,
        moved: tuple[list[cute.Tensor], Float32],
        pair: PagePair,
        where: Where,
        first: Int32,
        widest: Int32,
        last: Int32,
    ) -> None:
        """The vectors that `load` returned, to the other side; moved: with their factor."""
        config = self.config
        loaded, factor = moved
        for index in cutlass.range_constexpr(PAGES_VECTORS):
            unit = first + index * config.lanes
            head, vector = unit // widest, unit % widest
            if unit < last and vector < Int32(pair.vectors):
                address = self.address(pair, where, head, of_pages=not config.gathered)
                address += Int64(vector) * config.stored
                if cutlass.const_expr(config.quantised):
                    values = self.numbers(loaded[index])
                    store_bytes(packed_elements(values, factor, "e4m3", "sm_90a"), address)
                else:
                    store_bytes(loaded[index], address)

    @cute.jit
    def numbers(self, words: cute.Tensor) -> cute.Tensor:
        """The elements of a fragment, two to a word, in fp32."""
        if cutlass.const_expr(self.config.quantised == "bf16"):
            return widened(words)
        values = cute.make_rmem_tensor(2 * cute.size(words), Float32)
        for word in cutlass.range_constexpr(cute.size(words)):
            low, high = cute.arch.inline_ptx(
                HALVES, write_only_types=[Float32, Float32], read_only_args=[words[word]]
            )
            values[2 * word], values[2 * word + 1] = low, high
        return values

    @cute.jit
    def address(
        self, pair: PagePair, where: Where, head: Int32, of_pages: cutlass.Constexpr[bool]
    ) -> Int64:
        """Return the address of a token's head, among tokens or in its page."""
        if cutlass.const_expr(not of_pages):
            line = pair.tokens + Int64(where.token) * pair.token_stride
            return line + Int64(head) * pair.token_head_stride
        line = pair.pages + where.page * pair.page_stride + where.row * pair.row_stride
        return line + Int64(head) * pair.head_stride


def host_function(config: PagesConfig, _arch: str) -> tuple:
    """Return the function to compile for `config`, and example arguments."""
    return MovePages(config).with_table(PagesParams)
