"""The quantising kernel: rows, gathered if wished, to elements and swizzled scale factors.

Every byte of the scale factors of a block that holds rows is written, zeros where there is no row
or column. See moe.quantiser.config for who does what; no tensor cores, any architecture will do.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass.cute.runtime import make_fake_tensor

from kernelkit.arch import written_for
from kernelkit.fake import fake_tensor
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


@dataclass(frozen=True)
class Inputs:
    """x [T, K]; rows int32 [R], the row of x of each of the result or, scattered, that of the
    result for every copy; offsets int32 [E + 1]; None for what the config has not."""

    x: cute.Tensor
    rows: cute.Tensor | None
    offsets: cute.Tensor | None


@dataclass(frozen=True)
class Outputs:
    """data int32 [R, words] and scale factors int32 [words]."""

    data: cute.Tensor
    scales: cute.Tensor


@dataclass(frozen=True)
class Scaling:
    """given: fp32 [1], [T] or [R], an amax or a global scale; encode, decode: where the global
    scale and its inverse go, [1] or [R]."""

    given: cute.Tensor
    encode: cute.Tensor
    decode: cute.Tensor


@dataclass(frozen=True)
class Row:
    """A row that a thread has a part of."""

    source: Int32  # of x
    exists: Boolean
    targets: cute.Tensor  # the rows of the result that it becomes, in registers
    codes: Int64  # where its scale factors begin, in words


class Quantise:
    """Host function and kernel of one QuantiseConfig."""

    def __init__(self, config: QuantiseConfig, arch: str) -> None:
        self.config, self.arch = config, written_for(arch)

    @cute.jit
    def __call__(
        self,
        inputs: tuple[cute.Tensor | None, ...],
        outputs: tuple[cute.Tensor, ...],
        scaling: tuple[cute.Tensor, ...] | None,
        grid: tuple[Int32, ...],
        stream: CUstream,
    ) -> None:
        """The fields of `Inputs`, `Outputs` and `Scaling`, the last None in a format without a
        global scale. grid: CTAs that take turns at the tiles of a block, and blocks."""
        config, (ctas, blocks) = self.config, grid
        factors = None
        if cutlass.const_expr(scaling is not None):
            factors = Scaling(*scaling)
        self.kernel(Inputs(*inputs), Outputs(*outputs), factors).launch(
            grid=(ctas, config.parts, blocks), block=(config.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, inputs: Inputs, outputs: Outputs, scaling: Scaling | None) -> None:
        """Grid (CTAs that share tiles, parts of a tile, blocks); see `__call__`."""
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        cta, part, block = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        x, rows = inputs.x, inputs.rows
        first, end = block * SCALE_ROWS, outputs.data.shape[0]
        if cutlass.const_expr(config.scattered):
            end = x.shape[0]
        if cutlass.const_expr(config.grouped):
            first, end = rows_of_block(inputs.offsets, block, thread)
        inside, word = row_of_thread(part, config.parts, thread)
        row, neighbour = first + inside, thread % SCALE_COLUMNS
        if first != NO_ROWS:
            # The first of a part's rows; of a few rows most parts have none.
            if first + part * (ROWS_OF_QUARTER // config.parts) < end:
                is_row = row < end
                source = row
                if cutlass.const_expr(config.gathered):
                    source = rows[row] // config.choices if is_row else Int32(0)
                g = self.global_scale(scaling, row, source, is_row, cta == 0 and neighbour == 0)
                tiles = ceil_div(x.shape[1], config.format.block * config.columns)
                targets = self.targets(rows, row, is_row)
                place = Row(source, is_row, targets, self.place_of_codes(x, row, block, word))
                if cute.arch.vote_any_sync(is_row):
                    for tile in cutlass.range(cta, tiles, ctas, unroll=1):
                        self.quantise_row(x, outputs, g, tile, neighbour, place)
                else:
                    for atom in cutlass.range(cta, tiles * config.unrolled, ctas, unroll=1):
                        writes, k = neighbour == 0, x.shape[1]
                        self.store_codes(outputs.scales, k, Uint32(0), atom, writes, place)
            else:
                atoms = ceil_div(x.shape[1], config.format.block * SCALE_COLUMNS)
                if cutlass.const_expr(not config.scattered):
                    parts = config.parts
                    clear_part(outputs.scales, atoms, block, part, parts, cta, ctas, thread)

    @cute.jit
    def targets(self, rows: cute.Tensor | None, row: Int32, is_row: Boolean) -> cute.Tensor:
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
    def place_of_codes(self, x: cute.Tensor, row: Int32, block: Int32, word: Int32) -> Int64:
        """Where the scale factors of a row begin, in words; word: of an atom."""
        atoms = ceil_div(x.shape[1], self.config.format.block * SCALE_COLUMNS)
        begin = Int64(block) * atoms * SCALE_ROWS + word
        if cutlass.const_expr(self.config.scattered):
            begin = Int64(row) * (ceil_div(atoms, CODE_WORDS) * CODE_WORDS)
        return begin

    @cute.jit
    def quantise_row(
        self,
        x: cute.Tensor,
        outputs: Outputs,
        g: Float32 | None,
        tile: Int32,
        neighbour: Int32,
        row: Row,
    ) -> None:
        """A thread's part of a row in one tile, and the words of scale factors that it is in.

        g: the global scale. neighbour: which of the 4 threads that share the row.
        """
        config, is_row = self.config, row.exists
        columns = x.shape[1] // config.format.block
        mine = tile * SCALE_COLUMNS + neighbour
        loaded, first = [], mine * config.unrolled
        for index in cutlass.range_constexpr(config.unrolled):
            here = first + index
            loaded.append(self.load(x, row.source, here, is_row and here < columns))
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
                    self.store(outputs.data, row.targets, words[None, index], first + index)
        if cutlass.const_expr(config.wide):
            if is_row and first < columns:
                self.store(outputs.data, row.targets, words, mine)
        lanes = SCALE_COLUMNS // config.unrolled  # that share a word of scale factors
        codes = gathered(codes << Uint32(8 * config.unrolled * (neighbour % lanes)), lanes)
        atom = tile * config.unrolled + neighbour // lanes
        self.store_codes(outputs.scales, x.shape[1], codes, atom, neighbour % lanes == 0, row)

    @cute.jit
    def store(
        self, data: cute.Tensor, targets: cute.Tensor, words: cute.Tensor, column: Int32
    ) -> None:
        """Words of elements to all rows that they belong to; column: in units of the words."""
        size = cute.size(words)
        flat = cute.make_tensor(words.iterator, cute.make_layout(size))
        for copy in cutlass.range_constexpr(cute.size(targets)):
            exists = True
            if cutlass.const_expr(self.config.partial):
                exists = targets[copy] >= 0
            if exists:
                gRow = data[targets[copy], None]
                cute.autovec_copy(flat, cute.local_tile(gRow, (size,), (column,)))

    @cute.jit
    def store_codes(
        self, scales: cute.Tensor, k: Int32, codes: Uint32, atom: Int32, writes: Boolean, row: Row
    ) -> None:
        """A word of scale factors; zeros where there is no row.

        atom: of the row. writes: whether this thread is the one that writes it.
        """
        config = self.config
        writes = writes and atom < ceil_div(k, config.format.block * SCALE_COLUMNS)
        step = SCALE_ROWS
        if cutlass.const_expr(config.scattered):  # only rows have a place, word by word
            writes, step = writes and row.exists, 1
        if writes:
            scales[row.codes + Int64(atom) * step] = Int32(codes)

    @cute.jit
    def load(self, x: cute.Tensor, row: Int32, column: Int32, valid: Boolean) -> Any:
        """Block `column` of a row of x in registers, zeros where it is not valid."""
        block = self.config.format.block
        values = cute.make_rmem_tensor(block, TYPES[self.config.dtype])
        values.fill(0.0)
        if valid:
            cute.autovec_copy(cute.local_tile(x[row, None], (block,), (column,)), values)
        return values

    @cute.jit
    def global_scale(
        self, scaling: Scaling | None, row: Int32, source: Int32, is_row: Boolean, is_first: Boolean
    ) -> Float32 | None:
        """The global scale of a row, None in a format without; its first thread writes it down.

        row: of the result; source: of x.
        """
        config = self.config
        if cutlass.const_expr(scaling is None):
            return None
        index = Int32(0)
        if cutlass.const_expr(config.of_rows):
            index = row if config.scaling == "given rows" else source
            index = index if is_row else Int32(0)
        g = scaling.given[index]
        if cutlass.const_expr(config.scaling in ("tensor", "token")):
            g = encode_scale_of(g, config.format)
        writes = is_row and is_first
        if cutlass.const_expr(not config.of_rows):
            writes = writes and row == 0
        if writes:
            scaling.encode[row], scaling.decode[row] = g, Float32(1.0) / g
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
    tokens, k, rows, words, size, sizes = (cute.sym_int32() for _ in range(6))
    x = fake_tensor(TYPES[config.dtype], tokens, k, align=VECTOR_BYTES)
    unit = config.words * (config.unrolled if config.wide else 1)
    stride = cute.sym_int64(divisibility=unit)
    align = min(4 * unit, VECTOR_BYTES)
    data = make_fake_tensor(Int32, (rows, words), (stride, 1), assumed_align=align)
    scales = fake_tensor(Int32, size, align=VECTOR_BYTES)
    table = fake_tensor(Int32, rows) if config.gathered or config.scattered else None
    offsets = fake_tensor(Int32, sizes) if config.grouped else None
    scaling = None
    if config.scaling:
        scaling = tuple(fake_tensor(Float32, cute.sym_int32()) for _ in range(3))
    inputs, grid = (x, table, offsets), (Int32(0), Int32(0))
    return Quantise(config, arch), inputs, (data, scales), scaling, grid, CUstream(0)
