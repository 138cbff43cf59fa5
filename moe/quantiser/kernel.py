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

from kernelkit.arch import written_for
from moe.device.quantise import encode_scale_of, quantise_block
from moe.formats import SCALE_COLUMNS, SCALE_ROWS
from moe.quantiser.blocks import (
    NO_ROWS,
    ROWS_OF_QUARTER,
    ceil_div,
    clear_part,
    row_of_thread,
    rows_of_block,
)
from moe.quantiser.config import CODE_WORDS, VECTOR_BYTES, QuantiseConfig

TYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}


class Quantise:
    """Host function and kernel of one QuantiseConfig."""

    def __init__(self, config: QuantiseConfig, arch: str) -> None:
        self.config, self.arch = config, written_for(arch)

    @cute.jit
    def __call__(
        self, inputs: tuple, outputs: tuple, scaling: tuple | None, grid: tuple, stream: CUstream
    ) -> None:
        """inputs: x [T, K]; rows int32 [R], the row of x of each of the result or, scattered, that
        of the result for every copy; offsets int32 [E + 1]; None for what the config has not.

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
        if cutlass.const_expr(config.scattered):
            end = x.shape[0]
        if cutlass.const_expr(config.grouped):
            first, end = rows_of_block(offsets, block, thread)
        inside, word = row_of_thread(part, config.parts, thread)
        row, neighbour = first + inside, thread % SCALE_COLUMNS
        if first != NO_ROWS:
            # The first of a part's rows; of a few rows most parts have none.
            if first + part * (ROWS_OF_QUARTER // config.parts) < end:
                is_row = row < end
                source = row
                if cutlass.const_expr(config.gathered):
                    source = rows[row] // config.choices if is_row else Int32(0)
                item = (row, source, is_row)
                g = self.global_scale(scaling, cta == 0 and neighbour == 0, item)
                tiles = ceil_div(x.shape[1], config.format.block * config.columns)
                targets = self.targets(rows, row, is_row)
                place = (item, targets, self.place_of_codes(x, row, (block, word)))
                if cute.arch.vote_any_sync(is_row):
                    for tile in cutlass.range(cta, tiles, ctas, unroll=1):
                        self.quantise_row(x, outputs, g, (tile, neighbour), place)
                else:
                    for atom in cutlass.range(cta, tiles * config.unrolled, ctas, unroll=1):
                        here = (atom, neighbour == 0)
                        self.store_codes(outputs[1], x.shape[1], Uint32(0), here, place)
            else:
                atoms = ceil_div(x.shape[1], config.format.block * SCALE_COLUMNS)
                if cutlass.const_expr(not config.scattered):
                    clear_part(outputs[1], atoms, (block, part), (cta, ctas, thread), config.parts)

    @cute.jit
    def targets(self, rows: cute.Tensor | None, row: Int32, is_row: cutlass.Boolean) -> cute.Tensor:
        """The rows of the result that a row becomes, in registers."""
        config = self.config
        copies = config.choices if config.scattered else 1
        targets = cute.make_rmem_tensor(copies, Int32)
        targets.fill(row)
        if cutlass.const_expr(config.scattered):
            if is_row:
                for copy in cutlass.range_constexpr(copies):
                    targets[copy] = rows[row * copies + copy]
        return targets

    @cute.jit
    def place_of_codes(self, x: cute.Tensor, row: Int32, place: tuple) -> Int64:
        """Where the scale factors of a row begin, in words; place: (block, word of an atom)."""
        atoms = ceil_div(x.shape[1], self.config.format.block * SCALE_COLUMNS)
        block, word = place
        begin = Int64(block) * atoms * SCALE_ROWS + word
        if cutlass.const_expr(self.config.scattered):
            begin = Int64(row) * (ceil_div(atoms, CODE_WORDS) * CODE_WORDS)
        return begin

    @cute.jit
    def quantise_row(
        self, x: cute.Tensor, outputs: tuple, g: Float32 | None, column: tuple, place: tuple
    ) -> None:
        """A thread's part of a row in one tile, and the words of scale factors that it is in.

        column: (tile, of 4 neighbours); place: ((row of the result, of x, whether there is one),
        rows of the result, first word of the row's scale factors).
        """
        config, (data, scales), (tile, neighbour) = self.config, outputs, column
        (_, source, is_row), targets, _ = place
        columns = x.shape[1] // config.format.block
        mine = tile * SCALE_COLUMNS + neighbour
        loaded, first = [], mine * config.unrolled
        for index in cutlass.range_constexpr(config.unrolled):
            here = first + index
            loaded.append(self.load(x, source, here, is_row and here < columns))
        words, codes = cute.make_rmem_tensor((config.words, config.unrolled), Uint32), Uint32(0)
        for index in cutlass.range_constexpr(config.unrolled):
            values = cute.make_rmem_tensor(config.format.block, Float32)
            values.store(loaded[index].load().to(Float32))
            found, code = quantise_block(values, g, config.format, self.arch)
            for word in cutlass.range_constexpr(config.words):
                words[word, index] = found[word]
            if is_row and first + index < columns:
                codes |= code << Uint32(8 * index)
                if cutlass.const_expr(not config.wide):
                    self.store(data, targets, words[None, index], first + index)
        if cutlass.const_expr(config.wide):
            if is_row and first < columns:
                self.store(data, targets, words, mine)
        lanes = SCALE_COLUMNS // config.unrolled  # that share a word of scale factors
        codes = gathered(codes << Uint32(8 * config.unrolled * (neighbour % lanes)), lanes)
        atom = tile * config.unrolled + neighbour // lanes
        self.store_codes(scales, x.shape[1], codes, (atom, neighbour % lanes == 0), place)

    @cute.jit
    def store(
        self, data: cute.Tensor, targets: cute.Tensor, words: cute.Tensor, column: Int32
    ) -> None:
        """Words of elements to all rows that they belong to; column: in units of the words."""
        size = cute.size(words)
        flat = cute.make_tensor(words.iterator, cute.make_layout(size))
        for copy in cutlass.range_constexpr(cute.size(targets)):
            gRow = data[targets[copy], None]
            cute.autovec_copy(flat, cute.local_tile(gRow, (size,), (column,)))

    @cute.jit
    def store_codes(
        self, scales: cute.Tensor, k: Int32, codes: Uint32, column: tuple, place: tuple
    ) -> None:
        """A word of scale factors; zeros where there is no row.

        column: (atom of a row, whether this thread writes it); place: see `quantise_row`.
        """
        config, (atom, writes), (item, _, begin) = self.config, column, place
        writes = writes and atom < ceil_div(k, config.format.block * SCALE_COLUMNS)
        step = SCALE_ROWS
        if cutlass.const_expr(config.scattered):  # only rows have a place, word by word
            writes, step = writes and item[2], 1
        if writes:
            scales[begin + Int64(atom) * step] = Int32(codes)

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
def gathered(word: Uint32, lanes: cutlass.Constexpr[int]) -> Uint32:
    """The bits of all of 1, 2 or 4 neighbouring lanes, in each of them."""
    for step in (1, 2):
        if cutlass.const_expr(step < lanes):
            word |= cute.arch.shuffle_sync_bfly(word, step)
    return word


def host_function(config: QuantiseConfig, arch: str) -> tuple:
    """What is compiled for `config`, and example arguments."""
    return Quantise(config, arch), *_arguments(config)


def _arguments(config: QuantiseConfig) -> tuple:
    tokens, k, rows, words, size, sizes = (cute.sym_int32() for _ in range(6))
    dtype = TYPES[config.dtype]
    stride = cute.sym_int64(divisibility=config.vector)
    x = make_fake_tensor(dtype, (tokens, k), (stride, 1), assumed_align=VECTOR_BYTES)
    unit = config.words * (config.unrolled if config.wide else 1)
    stride = cute.sym_int64(divisibility=unit)
    align = min(4 * unit, VECTOR_BYTES)
    data = make_fake_tensor(Int32, (rows, words), (stride, 1), assumed_align=align)
    scales = make_fake_tensor(Int32, (size,), (1,), assumed_align=VECTOR_BYTES)
    table = make_fake_tensor(Int32, (rows,), (1,)) if config.gathered or config.scattered else None
    offsets = make_fake_tensor(Int32, (sizes,), (1,)) if config.grouped else None
    scaling = None
    if config.scaling:
        sizes = (cute.sym_int32() for _ in range(3))
        scaling = tuple(make_fake_tensor(Float32, (size,), (1,)) for size in sizes)
    return (x, table, offsets), (data, scales), scaling, (Int32(0), Int32(0)), CUstream(0)
