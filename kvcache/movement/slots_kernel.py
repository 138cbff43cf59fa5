"""Slots, or segments of them, to other slots of the same or another pool (device code)."""


import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, Uint32

from kernelkit.device_table import DeviceTable
from kernelkit.param_table import ParamTable, table_of
from kvcache.movement.config import VECTOR_BYTES, VECTORS, CopyConfig
from kvcache.movement.device import (
    load_bytes,
    number_at,
    numbers_of,
    store_bytes,
    zeros,
)

NUMBERS = 12  # in the table


class CopySlots:
    """Host function and kernel of one CopyConfig."""

    def __init__(self, config: CopyConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(self, table: ParamTable, ctas: Int32, stream: CUstream) -> None:
        """table: of source and target the address, bytes between slots, slots, bytes of a slot;
        address of the pairs, how many; address of the segments or, without, bytes of a piece;
        pieces of a slot.
        """
        self.kernel(table).launch(
            grid=(ctas, 1, 1), block=(self.config.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, table: DeviceTable) -> None:
        """CTAs take turns at the pieces of all pairs; see `__call__`."""
        numbers = numbers_of(table, NUMBERS)
        source, target, (pairs, segments) = numbers[:4], numbers[4:8], (numbers[8], numbers[10])
        count, size = Int32(numbers[9]), Int32(numbers[11])
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        for item in cutlass.range(cta, count * size, ctas, unroll=1):
            pair = Int32(Uint32(item) // Uint32(size))
            mine, other = number_at(pairs, 2 * pair), number_at(pairs, 2 * pair + 1)
            begin, place, nbytes = self.piece(segments, item - pair * size, source[3])
            inside = begin >= 0 and place >= 0 and nbytes >= 0
            inside = inside and begin + nbytes <= source[3] and place + nbytes <= target[3]
            exists = mine >= 0 and mine < source[2]
            exists = exists and other >= 0 and other < target[2]
            if exists and inside:
                here = source[0] + mine * source[1] + begin
                self.copy(here, target[0] + other * target[1] + place, Int32(nbytes))

    @cute.jit
    def piece(self, segments: Int64, index: Int32, slot_bytes: Int64) -> tuple:
        """(offset in the source, in the target, bytes); segments: their address, or a size."""
        if cutlass.const_expr(self.config.segmented):
            return tuple(number_at(segments, 3 * index + field) for field in range(3))
        begin = Int64(index) * segments
        return begin, begin, cutlass.min(slot_bytes - begin, segments)

    @cute.jit
    def copy(self, source: Int64, target: Int64, nbytes: Int32) -> None:
        """By all threads of the CTA."""
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        step = config.threads * VECTOR_BYTES
        for first in cutlass.range(thread * VECTOR_BYTES, nbytes, step * VECTORS, unroll=1):
            loaded = []
            for index in cutlass.range_constexpr(VECTORS):
                words = zeros(VECTOR_BYTES // 4)
                here = first + index * step
                if here < nbytes:
                    load_bytes(source + Int64(here), words)
                loaded.append(words)
            for index in cutlass.range_constexpr(VECTORS):
                here = first + index * step
                if here < nbytes:
                    store_bytes(loaded[index], target + Int64(here))


def host_function(config: CopyConfig, _arch: str) -> tuple:
    """What is compiled for `config`, and example arguments."""
    return CopySlots(config), table_of([0] * NUMBERS), Int32(0), CUstream(0)
