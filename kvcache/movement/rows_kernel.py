"""Rows as they are, between tokens and entries, for one or two tensors at once (device code)."""


import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64

from kernelkit.device_table import DeviceTable
from kernelkit.param_table import ParamTable, table_of
from kvcache.movement.config import VECTORS, RowsConfig
from kvcache.movement.device import (
    entry_of,
    load_bytes,
    numbers_of,
    place_of,
    store_bytes,
    vector_type,
    zeros,
)

NUMBERS, OF_PAIR = 3, 6  # in the table: before those of a pair, of each pair


class CopyRows:
    """Host function and kernel of one RowsConfig."""

    def __init__(self, config: RowsConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(self, table: ParamTable, ctas: Int32, stream: CUstream) -> None:
        """table: address of the mapping, tokens, entries of each pool; of each tensor the address
        of its tokens and bytes between them, address of the first entry, bytes between slots, rows,
        and vectors of a row.
        """
        self.kernel(table).launch(
            grid=(ctas, 1, 1), block=(self.config.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, table: DeviceTable) -> None:
        """Groups of `lanes` threads take turns at the tokens; see `__call__`."""
        config, numbers = self.config, numbers_of(table, NUMBERS + OF_PAIR * self.config.pairs)
        mapping, tokens, entries = numbers[0], Int32(numbers[1]), numbers[2]
        pairs = tuple(
            numbers[first : first + OF_PAIR] for first in range(NUMBERS, len(numbers), OF_PAIR)
        )
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        lane = thread % config.lanes
        mine = cta * config.rows + thread // config.lanes
        most = Int32(pairs[0][5])
        if cutlass.const_expr(config.pairs == 2):
            most = cutlass.max(most, Int32(pairs[1][5]))
        for token in cutlass.range(mine, tokens, ctas * config.rows, unroll=1):
            entry = entry_of(mapping, token, entries)
            if config.gathered or entry >= 0:
                for vector in cutlass.range(lane, most, config.lanes * VECTORS, unroll=1):
                    loaded = []
                    for pair in pairs:
                        loaded.append(self.load(pair, token, entry, vector))
                    for index in cutlass.range_constexpr(config.pairs):
                        self.store(loaded[index], pairs[index], (token, entry), vector)

    @cute.jit
    def load(self, pair: tuple, token: Int32, entry: Int32, first: Int32) -> list:
        """VECTORS vectors from `first` on, zeros where there is no entry."""
        config = self.config
        dtype, size = vector_type(config.vector)
        place = self.place(pair, token, entry, of_entry=config.gathered)
        found = []
        for index in cutlass.range_constexpr(VECTORS):
            vector, words = first + index * config.lanes, zeros(size, dtype)
            if entry >= 0 and vector < Int32(pair[5]):
                load_bytes(place + Int64(vector) * config.vector, words)
            found.append(words)
        return found

    @cute.jit
    def store(self, loaded: list, pair: tuple, row: tuple, first: Int32) -> None:
        """What `load` returns; row: (token, entry)."""
        config = self.config
        place = self.place(pair, *row, of_entry=not config.gathered)
        for index in cutlass.range_constexpr(VECTORS):
            vector = first + index * config.lanes
            if vector < Int32(pair[5]):
                store_bytes(loaded[index], place + Int64(vector) * config.vector)

    @cute.jit
    def place(
        self, pair: tuple, token: Int32, entry: Int32, of_entry: cutlass.Constexpr[bool]
    ) -> Int64:
        """Address of the row of a token or of an entry."""
        tokens, stride, pool, slot_stride, rows, vectors = pair
        if cutlass.const_expr(not of_entry):
            return tokens + Int64(token) * stride
        slot, row = place_of(cutlass.max(entry, Int32(0)), rows)
        return pool + slot * slot_stride + (row * vectors) * self.config.vector


def host_function(config: RowsConfig, _arch: str) -> tuple:
    """What is compiled for `config`, and example arguments."""
    numbers = [0] * (NUMBERS + OF_PAIR * config.pairs)
    return CopyRows(config), table_of(numbers), Int32(0), CUstream(0)
