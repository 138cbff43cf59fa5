"""Rows as they are, between tokens and entries, for one or two tensors at once (device code)."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from kernelkit.device.device_table import DeviceTable
from kernelkit.device.table_kernel import TableKernel
from kvcache.movement.config import VECTORS, RowPair, RowsConfig, RowsParams, TwoRowsParams
from kvcache.movement.device import (
    entry_of,
    load_bytes,
    slot_row,
    store_bytes,
    vector_type,
    zeros,
)


def params_of(config: RowsConfig) -> type[RowsParams]:
    """Return the class of the launch parameters of this config."""
    return TwoRowsParams if config.pairs == 2 else RowsParams


class CopyRows(TableKernel):
    """The kernel of one RowsConfig; table: see `params_of`."""

    config: RowsConfig

    @cute.kernel
    def kernel(self, table: DeviceTable) -> None:
        """Groups of `lanes` threads take turns at the tokens."""
        config, params = self.config, table.unpack(params_of(self.config))
        pairs, tokens = [params.first], Int32(params.tokens)
        if cutlass.const_expr(config.pairs == 2):
            pairs.append(params.second)
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        lane = thread % config.lanes
        mine = cta * config.rows + thread // config.lanes
        most = Int32(params.first.vectors)
        if cutlass.const_expr(config.pairs == 2):
            most = cutlass.max(most, Int32(params.second.vectors))
        for token in cutlass.range(mine, tokens, ctas * config.rows, unroll=1):
            entry = entry_of(params.mapping, token, params.entries)
            if config.gathered or entry >= 0:
                for vector in cutlass.range(lane, most, config.lanes * VECTORS, unroll=1):
                    loaded = []
                    for pair in pairs:
                        loaded.append(self.load(pair, token, entry, vector))
                    for index in cutlass.range_constexpr(config.pairs):
                        self.store(loaded[index], pairs[index], token, entry, vector)

    @cute.jit
    def load(self, pair: RowPair, token: Int32, entry: Int32, first: Int32) -> list[cute.Tensor]:
        """VECTORS vectors of a row from `first` on, zeros where there is no entry."""
        config = self.config
        dtype, size = vector_type(config.vector)
        address = self.row_address(pair, token, entry, of_entry=config.gathered)
        found = []
        for index in cutlass.range_constexpr(VECTORS):
            vector, words = first + index * config.lanes, zeros(size, dtype)
            if entry >= 0 and vector < Int32(pair.vectors):
                load_bytes(address + Int64(vector) * config.vector, words)
            found.append(words)
        return found

    @cute.jit
    def store(
        self, loaded: list[cute.Tensor], pair: RowPair, token: Int32, entry: Int32, first: Int32
    ) -> None:
        """The vectors that `load` returned, to the other side."""
        config = self.config
        address = self.row_address(pair, token, entry, of_entry=not config.gathered)
        for index in cutlass.range_constexpr(VECTORS):
            vector = first + index * config.lanes
            if vector < Int32(pair.vectors):
                store_bytes(loaded[index], address + Int64(vector) * config.vector)

    @cute.jit
    def row_address(
        self, pair: RowPair, token: Int32, entry: Int32, of_entry: cutlass.Constexpr[bool]
    ) -> Int64:
        """The address of the row of a token or of an entry; of entry 0 for a negative number."""
        if cutlass.const_expr(not of_entry):
            return pair.tokens + Int64(token) * pair.token_stride
        place = slot_row(cutlass.max(entry, Int32(0)), pair.rows)
        slot = pair.data + place.slot * pair.slot_stride
        return slot + (place.row * pair.vectors) * self.config.vector


def host_function(config: RowsConfig, _arch: str) -> tuple:
    """Return the function to compile for `config`, and example arguments."""
    return CopyRows(config).with_table(params_of(config))
