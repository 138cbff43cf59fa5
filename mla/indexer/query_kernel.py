"""Device code that rotates, transforms and quantises queries of the indexer.

For FP8 the scale of a row is multiplied into its weight. A row is one head of a token and is held
by 16 lanes; see `mla.indexer.entry`.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint16, Uint32

from kernelkit.compile.arch import written_for
from kernelkit.device.device_table import DeviceTable
from kernelkit.device.table_kernel import TableKernel
from kernelkit.device.words import float_of
from kernelkit.plan.hw import WARP_THREADS
from kvcache.movement.device import EntryAddress, int64_at, load_bytes, store_word, zeros
from kvcache.movement.entry import scale_bits, widened
from mla.indexer.entry import (
    load_row_angles,
    prepared_row,
    quantised_row,
    row_address,
    store_row,
)
from mla.indexer.formats import LANES, PIECE
from mla.indexer.params import HeadRows, QueryParams
from mla.indexer.query_config import QueryConfig


class Query(TableKernel):
    """The kernel of one QueryConfig, launched with a table of `QueryParams`.

    arch: architecture that the kernel is written for.
    """

    config: QueryConfig

    def __init__(self, config: QueryConfig, arch: str) -> None:
        super().__init__(config)
        self.arch = arch

    @cute.kernel
    def kernel(self, table: DeviceTable) -> None:
        """CTAs divide the rows."""
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        self.run_cta(table.unpack(QueryParams), cta, ctas)

    @cute.jit
    def run_cta(self, params: QueryParams, cta: Int32, ctas: Int32) -> None:
        """Process the rows of CTA number `cta` of `ctas`; groups of 16 lanes loop over them."""
        config, heads, rows = self.config, params.heads, Int32(params.rows)
        thread, _, _ = cute.arch.thread_idx()
        lane, form = thread % LANES, config.form
        # The loop bounds are the same in all lanes of a warp, even if its second row does not
        # exist.
        first = (cta * config.rows + thread // WARP_THREADS * (WARP_THREADS // LANES)).to(Int32)
        for begin in cutlass.range(first, rows, ctas * config.rows, unroll=1):
            row = begin + thread % WARP_THREADS // LANES
            exists = row < rows
            index = Uint32(cutlass.min(row, rows - 1))
            token = index // Uint32(heads)
            head = index - token * Uint32(heads)
            values = self.load(params.q, token, head, lane)
            position = int64_at(params.positions, Int32(token))
            angles = load_row_angles(params.angles, position, config.rotation)
            weight = self.load_weight(params.weights, token, head)
            words = prepared_row(values, angles, config.rotation)
            elements, code = quantised_row(words, form, self.arch)
            address = EntryAddress(
                params.data + Int64(index) * form.record.data_bytes,
                params.scales + Int64(index) * form.record.scale_bytes,
            )
            # The scale of FP8 is stored in the weight only.
            store_row(elements, code, form, address, exists, scaled=form.scale_size == 1)
            weight = weight * float_of(Uint32(params.factor_bits))
            if cutlass.const_expr(form.scale_size > 1):
                weight = weight * float_of(scale_bits(code))
            if exists and lane == 0:
                store_word(weight, params.out_weights + Int64(index) * 4)

    @cute.jit
    def load(self, q: HeadRows, token: Uint32, head: Uint32, lane: Int32) -> cute.Tensor:
        """Load a lane's elements of a row."""
        size = PIECE * (2 if self.config.dtype == "bf16" else 4)
        place = row_address(q, token, head) + lane * size
        if cutlass.const_expr(self.config.dtype == "bf16"):
            words = zeros(PIECE // 2)
            load_bytes(place, words)
            return widened(words)
        values = cute.make_rmem_tensor(PIECE, Float32)
        for part in cutlass.range_constexpr(2):
            load_bytes(place + part * 16, cute.local_tile(values, (PIECE // 2,), (part,)))
        return values

    @cute.jit
    def load_weight(self, weights: HeadRows, token: Uint32, head: Uint32) -> Float32:
        """The weight of a row."""
        place = row_address(weights, token, head)
        if cutlass.const_expr(self.config.weights == "bf16"):
            half = zeros(1, Uint16)
            load_bytes(place, half)
            return float_of(Uint32(half[0]) << 16)
        word = zeros(1, Uint32)
        load_bytes(place, word)
        return float_of(word[0])


def host_function(config: QueryConfig, arch: str) -> tuple:
    """Return the function to compile for `config`, and example arguments."""
    return Query(config, written_for(arch)).with_table(QueryParams)
