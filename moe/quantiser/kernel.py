"""The quantising kernel: rows, gathered if wished, to elements and swizzled scale factors.

Every byte of the scale factors of a block that holds rows is written, zeros where there is no row
or column. See moe.quantiser.config for who does what; no tensor cores, any architecture will do.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.runtime import make_fake_tensor

from kernelkit import hw
from kernelkit.compile import compile_once
from kernelkit.launch import written_for
from moe.device.quantise import encode_scale_of, quantise_block
from moe.device.warp import sum_below
from moe.formats import SCALE_COLUMNS, SCALE_ROWS
from moe.quantiser.config import QUARTERS, VECTOR_BYTES, QuantiseConfig

TYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}
ROWS_OF_QUARTER = SCALE_ROWS // QUARTERS
NO_ROWS = -1


class Quantise:
    """Host function and kernel of one QuantiseConfig."""

    def __init__(self, config: QuantiseConfig, arch: str) -> None:
        self.config, self.arch = config, written_for(arch)

    @cute.jit
    def __call__(
        self, inputs: tuple, outputs: tuple, scaling: tuple | None, grid: tuple, stream: CUstream
    ) -> None:
        """inputs: x [T, K]; rows int32 [R], the row of x of each of the result, and offsets int32
        [E + 1], or None for what the config has not.

        outputs: data int32 [R, words] and scale factors int32 [words]. scaling: fp32 [1], [T] or
        [R], an amax or a global scale, and where the global scale and its inverse go, [1] or [R].
        grid: CTAs that take turns at the tiles of a block, and blocks.
        """
        config, (ctas, blocks) = self.config, grid
        self.kernel(inputs, outputs, scaling).launch(
            grid=(ctas, config.parts, blocks), block=(config.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, inputs: tuple, outputs: tuple, scaling: tuple | None) -> None:
        """Grid (CTAs that share tiles, parts of a tile, blocks); see `__call__`."""
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        cta, part, block = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        x, rows, offsets = inputs
        first, end = block * SCALE_ROWS, outputs[0].shape[0]
        if cutlass.const_expr(config.grouped):
            first, end = rows_of_block(offsets, block)
        lane, warp = thread % hw.WARP_THREADS, thread // hw.WARP_THREADS
        quarter = lane // SCALE_COLUMNS % QUARTERS
        in_quarter = part * (ROWS_OF_QUARTER // config.parts) + warp * 2
        in_quarter += lane // (SCALE_COLUMNS * QUARTERS)
        row = first + quarter * ROWS_OF_QUARTER + in_quarter
        if first != NO_ROWS:
            is_row = row < end
            source = row
            if cutlass.const_expr(config.gathered):
                source = rows[row] // config.choices if is_row else Int32(0)
            neighbour = lane % SCALE_COLUMNS
            item = (row, source, is_row)
            g = self.global_scale(scaling, cta == 0 and neighbour == 0, item)
            place = (item, (block, in_quarter * QUARTERS + quarter))
            tiles = _ceil_div(x.shape[1], config.format.block * config.columns)
            # Of a few rows most warps have none: they have but zeros to write.
            if cute.arch.vote_any_sync(is_row):
                for tile in cutlass.range(cta, tiles, ctas, unroll=1):
                    self.quantise_row(x, outputs, g, (tile, neighbour), place)
            else:
                for tile in cutlass.range(cta, tiles, ctas, unroll=1):
                    for index in cutlass.range_constexpr(config.unrolled):
                        here = (tile * config.unrolled + index, neighbour)
                        self.store_codes(outputs[1], x.shape[1], Uint32(0), here, place[1])

    @cute.jit
    def quantise_row(
        self, x: cute.Tensor, outputs: tuple, g: Float32 | None, column: tuple, place: tuple
    ) -> None:
        """A thread's part of a row in one tile, and the words of scale factors that it is in.

        column: (tile, of 4 neighbours); place: ((row of the result, of x, whether there is one),
        (block, word of the row's scale factors in an atom)).
        """
        config, (data, scales), (tile, neighbour) = self.config, outputs, column
        (row, source, is_row), _ = place
        columns = x.shape[1] // config.format.block
        loaded, first = [], tile * config.columns + neighbour
        for index in cutlass.range_constexpr(config.unrolled):
            here = first + index * SCALE_COLUMNS
            loaded.append(self.load(x, source, here, is_row and here < columns))
        for index in cutlass.range_constexpr(config.unrolled):
            here = first + index * SCALE_COLUMNS
            values = cute.make_rmem_tensor(config.format.block, Float32)
            values.store(loaded[index].load().to(Float32))
            words, code = quantise_block(values, g, config.format, self.arch)
            if is_row and here < columns:
                target = cute.local_tile(data[row, None], (config.words,), (here,))
                cute.autovec_copy(words, target)
            else:
                code = Uint32(0)
            codes = gathered_bytes(code, neighbour)
            here = (tile * config.unrolled + index, neighbour)
            self.store_codes(scales, x.shape[1], codes, here, place[1])

    @cute.jit
    def store_codes(
        self, scales: cute.Tensor, k: Int32, codes: Uint32, column: tuple, place: tuple
    ) -> None:
        """The scale factors of 4 neighbours, by the first of them.

        column: (atom of a block, of 4 neighbours); place: (block, word of the atom).
        """
        (atom, neighbour), (block, word) = column, place
        atoms = _ceil_div(k, self.config.format.block * SCALE_COLUMNS)
        if neighbour == 0 and atom < atoms:
            scales[(Int64(block) * atoms + atom) * SCALE_ROWS + word] = Int32(codes)

    @cute.jit
    def load(self, x: cute.Tensor, row: Int32, column: Int32, valid: cutlass.Boolean) -> Any:
        """Block `column` of a row of x in registers, zeros where it is not valid."""
        block = self.config.format.block
        values = cute.make_rmem_tensor(block, TYPES[self.config.dtype])
        values.fill(0.0)
        if valid:
            cute.autovec_copy(cute.local_tile(x[row, None], (block,), (column,)), values)
        return values

    @cute.jit
    def global_scale(self, scaling: tuple | None, is_first: cutlass.Boolean, item: tuple) -> Any:
        """The global scale of a row, None in a format without; its first thread writes it down.

        item: (row of the result, of x, whether there is one).
        """
        config, (row, source, is_row) = self.config, item
        if cutlass.const_expr(scaling is None):
            return None
        given, encode, decode = scaling
        index = Int32(0)
        if cutlass.const_expr(config.of_rows):
            index = row if config.scaling == "given rows" else source
            index = index if is_row else Int32(0)
        g = given[index]
        if cutlass.const_expr(config.scaling in ("tensor", "token")):
            g = encode_scale_of(g, config.format)
        writes = is_row and is_first
        if cutlass.const_expr(not config.of_rows):
            writes = writes and row == 0
        if writes:
            encode[row], decode[row] = g, Float32(1.0) / g
        return g


@cute.jit
def gathered_bytes(code: Uint32, neighbour: Int32) -> Uint32:
    """A word of the codes of 4 neighbouring lanes, the first lowest, in each of them."""
    word = code << Uint32(8 * neighbour)
    word |= cute.arch.shuffle_sync_bfly(word, 1)
    return word | cute.arch.shuffle_sync_bfly(word, 2)


@cute.jit
def rows_of_block(offsets: cute.Tensor, block: Int32) -> tuple:
    """(first row, end of its expert's rows) of a block; NO_ROWS behind the last one.

    All lanes of a warp take part, each with an equal share of consecutive experts.
    """
    lane, experts = cute.arch.lane_idx(), cute.size(offsets) - 1
    share = _ceil_div(experts, hw.WARP_THREADS)
    begin = cutlass.min(lane * share, experts)
    end = cutlass.min(begin + share, experts)
    mine = Int32(0)
    for expert in cutlass.range(begin, end):
        mine += _ceil_div(offsets[expert + 1] - offsets[expert], SCALE_ROWS)
    before = sum_below(mine, lane)
    first, last = Int32(NO_ROWS), Int32(NO_ROWS)
    if before <= block and block < before + mine:
        for expert in cutlass.range(begin, end):
            count = _ceil_div(offsets[expert + 1] - offsets[expert], SCALE_ROWS)
            if before <= block and block < before + count:
                first = offsets[expert] + (block - before) * SCALE_ROWS
                last = offsets[expert + 1]
            before += count
    return cute.arch.warp_redux_sync(first, "max"), cute.arch.warp_redux_sync(last, "max")


def _ceil_div(number: Any, unit: int) -> Any:
    return (number + (unit - 1)) // unit


def compile_quantise(config: QuantiseConfig, arch: str) -> Any:
    """The compiled `Quantise.__call__` of `config`; compiled once per process."""
    return compile_once(config, arch, lambda: (Quantise(config, arch), *_arguments(config)))


def _arguments(config: QuantiseConfig) -> tuple:
    tokens, k, rows, words, size, sizes = (cute.sym_int32() for _ in range(6))
    dtype = TYPES[config.dtype]
    stride = cute.sym_int64(divisibility=config.vector)
    x = make_fake_tensor(dtype, (tokens, k), (stride, 1), assumed_align=VECTOR_BYTES)
    stride = cute.sym_int64(divisibility=config.words)
    align = min(4 * config.words, VECTOR_BYTES)
    data = make_fake_tensor(Int32, (rows, words), (stride, 1), assumed_align=align)
    scales = make_fake_tensor(Int32, (size,), (1,))
    table = make_fake_tensor(Int32, (rows,), (1,)) if config.gathered else None
    offsets = make_fake_tensor(Int32, (sizes,), (1,)) if config.grouped else None
    scaling = None
    if config.scaling:
        sizes = (cute.sym_int32() for _ in range(3))
        scaling = tuple(make_fake_tensor(Float32, (size,), (1,)) for size in sizes)
    return (x, table, offsets), (data, scales), scaling, (Int32(0), Int32(0)), CUstream(0)
