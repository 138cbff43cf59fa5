"""Rotation of queries and keys after a product, and the append of keys and values (device code)."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from examples.gpt_oss.few.config import (
    LANE_ELEMENTS,
    VECTOR_BYTES,
    HeadsConfig,
    HeadsParams,
    HeadWords,
)
from examples.gpt_oss.few.product_kernel import WORDS, entry_offset, four_words
from kernelkit.device.dependent import follow
from kernelkit.device.device_table import DeviceTable
from kernelkit.device.table_kernel import TableKernel
from kernelkit.device.warp_mma import pack
from kernelkit.device.words import two_of_bf16, vector_at

FOUR = 4  # fp32 of a vector


class Heads(TableKernel):
    """The kernel of one HeadsConfig; table: `HeadsParams`."""

    config: HeadsConfig
    pdl = True

    @cute.kernel
    def kernel(self, table: DeviceTable) -> None:
        """A thread has a vector of the first half of a head, and its partners in the second."""
        config, params = self.config, table.unpack(HeadsParams)
        cta, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        follow()
        heads = params.heads
        q_heads, kv_heads = Int32(heads.q_heads), Int32(heads.kv_heads)
        count = q_heads + 2 * kv_heads
        item = cta * config.threads + thread
        head = item // config.vectors
        token, column = head // count, item % config.vectors * LANE_ELEMENTS
        head = head % count
        if token < Int32(params.tokens):
            source = params.x + (Int64(item // config.vectors) * config.head_dim + column) * 2
            low, high = four_words(source), four_words(source + config.head_dim)
            if head < q_heads + kv_heads:
                low, high = self.rotated(heads, token, column, low, high)
            if head < q_heads:
                row = Int64(token) * q_heads + head
                self.store(heads.queries, row * config.head_dim + column, low, high)
            else:
                entry = vector_at(heads.mapping + Int64(token) * 8, Int64, 1)[0]
                if entry >= 0:
                    base = heads.cache.keys
                    head = head - q_heads
                    if head >= kv_heads:
                        base, head = heads.cache.values, head - kv_heads
                    place = base + entry_offset(heads.cache, entry)
                    self.store(place, Int64(head * config.head_dim + column), low, high)

    @cute.jit
    def rotated(
        self,
        heads: HeadWords,
        token: Int32,
        column: Int32,
        low: tuple[Uint32, ...],
        high: tuple[Uint32, ...],
    ) -> tuple[tuple[Uint32, ...], tuple[Uint32, ...]]:
        """Return both vectors, turned; in fp32, rounded once."""
        dim = self.config.head_dim
        position = vector_at(heads.positions + Int64(token) * 8, Int64, 1)[0]
        table = heads.angles + (position * (2 * dim) + column) * 4
        cos, sin = self.load_angles(table), self.load_angles(table + 3 * (dim // 2) * 4)
        first, second = [], []
        for word in cutlass.range_constexpr(WORDS):
            lows, highs = two_of_bf16(low[word]), two_of_bf16(high[word])
            pairs = []
            for half in cutlass.range_constexpr(2):
                by, across = cos[2 * word + half], sin[2 * word + half]
                x, y = lows[half], highs[half]
                pairs.append((x * by - y * across, y * by + x * across))
            first.append(pack(pairs[0][0], pairs[1][0], "bf16"))
            second.append(pack(pairs[0][1], pairs[1][1], "bf16"))
        return tuple(first), tuple(second)

    @cute.jit
    def load_angles(self, address: Int64) -> list[Float32]:
        """Load as many fp32 as a vector has elements."""
        found = []
        for part in cutlass.range_constexpr(LANE_ELEMENTS // FOUR):
            numbers = cute.make_rmem_tensor(FOUR, Float32)
            cute.autovec_copy(vector_at(address + part * VECTOR_BYTES, Float32, FOUR), numbers)
            found += [numbers[index] for index in range(FOUR)]
        return found

    @cute.jit
    def store(
        self, base: Int64, element: Int64, low: tuple[Uint32, ...], high: tuple[Uint32, ...]
    ) -> None:
        """Store both vectors of a head."""
        for words, offset in ((low, 0), (high, self.config.head_dim)):
            target = vector_at(base + element * 2 + offset, Uint32, WORDS)
            loaded = cute.make_rmem_tensor(WORDS, Uint32)
            for index in cutlass.range_constexpr(WORDS):
                loaded[index] = words[index]
            cute.autovec_copy(loaded, target)


def host_function(config: HeadsConfig, _arch: str) -> tuple:
    """Return the function to compile for `config`, and example arguments."""
    return Heads(config).with_table(HeadsParams)
