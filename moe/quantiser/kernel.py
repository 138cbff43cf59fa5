"""The quantising kernel: rows, optionally gathered, to elements and swizzled scale factors.

If a block holds rows, all bytes of its scale factors are written, with zeros for missing rows and
columns. moe.quantiser.config documents the work of each thread. There are no tensor cores; any
architecture works.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator

from kernelkit.compile.arch import written_for
from kernelkit.device.dependent import follow
from kernelkit.device.fake import fake_tensor
from kernelkit.plan import hw
from moe.formats import SCALE_COLUMNS, SCALE_ROWS
from moe.quantiser.blocks import (
    NO_ROWS,
    ROWS_OF_QUARTER,
    ceil_div,
    clear_part,
    row_of_lane,
    row_of_thread,
    rows_of_block,
)
from moe.quantiser.config import CODE_WORDS, CTAS_OF_AMAX, MAX_WHOLE, VECTOR_BYTES, QuantiseConfig
from moe.shared.quantise import encode_scale_of, float_of_half, largest_half, quantise_block

TYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}


@dataclass(frozen=True)
class Inputs:
    """Inputs; None for those that the config does not use.

    x: [T, K].
    rows: int32 [R], the row of x of each row of the result or, if scattered, the row of the result
    of each copy.
    offsets: int32 [E + 1].
    """

    x: cute.Tensor
    rows: cute.Tensor | None
    offsets: cute.Tensor | None


@dataclass(frozen=True)
class Outputs:
    """Outputs: data int32 [R, words] and scale factors int32 [words]."""

    data: cute.Tensor
    scales: cute.Tensor


@dataclass(frozen=True)
class Scaling:
    """Global scales.

    given: fp32 [1] or [R], a global scale; or int32 [parts], the bits of the amax of each part of
    x; or None.
    encode, decode: outputs of the global scale and its inverse, [1] or [R].
    """

    given: cute.Tensor | None
    encode: cute.Tensor
    decode: cute.Tensor


@dataclass(frozen=True)
class Row:
    """A row that a thread has a part of."""

    number: Int32  # row of the result, or of x if scattered
    source: Int32  # row of x
    exists: Boolean
    targets: cute.Tensor  # its rows of the result, in registers
    codes: Int64  # first word of its scale factors


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
        """Launch the kernel.

        Args:
            inputs, outputs: the fields of `Inputs` and `Outputs`.
            scaling: the fields of `Scaling`; None in a format without a global scale.
            grid: CTAs that share the tiles of a block, and blocks.
        """
        config, (ctas, blocks) = self.config, grid
        factors = None
        if cutlass.const_expr(scaling is not None):
            factors = Scaling(*scaling)
        self.kernel(Inputs(*inputs), Outputs(*outputs), factors).launch(
            grid=(ctas, config.parts, blocks),
            block=(config.threads, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, inputs: Inputs, outputs: Outputs, scaling: Scaling | None) -> None:
        """Grid (CTAs that share tiles, parts of a tile, blocks); see `__call__`."""
        follow()
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        cta, part, block = cute.arch.block_idx()
        ctas, _, blocks = cute.arch.grid_dim()
        x, rows, smem = inputs.x, inputs.rows, SmemAllocator()
        if cutlass.const_expr(config.scaling == "tensor"):
            block = blocks - 1 - block  # the last rows of the amax kernel are still in L2
        first, end = block * SCALE_ROWS, outputs.data.shape[0]
        if cutlass.const_expr(config.scattered):
            end = x.shape[0]
        if cutlass.const_expr(config.grouped):
            sRows = smem.allocate_tensor(Int32, cute.make_layout(2))
            first, end = rows_of_block(inputs.offsets, block, thread, sRows)
        sTops = None
        if cutlass.const_expr(config.scaling in ("tensor", "token")):
            sTops = smem.allocate_tensor(Int32, cute.make_layout((MAX_WHOLE, config.warps)))
        if cutlass.const_expr(config.whole):
            inside, word = row_of_lane(part, config.whole, thread)
            first_inside = row_of_lane(part, config.whole, Int32(0))[0]
        else:
            inside, word = row_of_thread(part, config.parts, thread)
            first_inside = part * (ROWS_OF_QUARTER // config.parts)
        row, neighbour = first + inside, thread % config.neighbours
        if first != NO_ROWS:
            # First row of a part; with few rows most parts have none.
            if first + first_inside < end:
                is_row = row < end
                source = row
                if cutlass.const_expr(config.gathered):
                    source = rows[row] // config.choices if is_row else Int32(0)
                targets = self.targets(rows, row, is_row)
                codes = self.place_of_codes(x, row, block, word)
                place = Row(row, source, is_row, targets, codes)
                if cutlass.const_expr(config.whole):
                    self.quantise_whole(x, outputs, scaling, sTops, place)
                else:
                    self.quantise_tiles(x, outputs, scaling, sTops, place)
            elif cutlass.const_expr(not config.scattered):
                atoms = ceil_div(x.shape[1], config.format.block * SCALE_COLUMNS)
                scales, parts = outputs.scales, config.parts
                if cutlass.const_expr(config.whole):
                    begin = self.place_of_codes(x, row, block, word)
                    step = config.threads // config.whole
                    mine = thread // hw.WARP_THREADS * config.neighbours + neighbour
                    for atom in cutlass.range(mine, atoms, step, unroll=1):
                        scales[begin + Int64(atom) * SCALE_ROWS] = Int32(0)
                else:
                    clear_part(scales, atoms, block, part, parts, cta, ctas, thread)

    @cute.jit
    def quantise_tiles(
        self,
        x: cute.Tensor,
        outputs: Outputs,
        scaling: Scaling | None,
        sTops: cute.Tensor | None,
        row: Row,
    ) -> None:
        """Quantise this CTA's tiles. The first one is loaded while the global scale is found."""
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        neighbour, step = thread % config.neighbours, ctas * config.neighbours
        tiles = ceil_div(x.shape[1], config.format.block * config.columns)
        loaded = self.empty_part()
        self.load_part(x, cta * config.neighbours + neighbour, row, loaded)
        g = self.global_scale(scaling, sTops, row)
        self.note(scaling, g, cta == 0 and neighbour == 0, row)
        if cute.arch.vote_any_sync(row.exists):
            for tile in cutlass.range(cta, tiles, ctas, unroll=1):
                mine = tile * config.neighbours + neighbour
                self.quantise_part(x, outputs, g, mine, loaded, row)
                if tile + ctas < tiles:
                    self.load_part(x, mine + step, row, loaded)
        else:
            for atom in cutlass.range(cta, tiles * config.unrolled, ctas, unroll=1):
                self.store_codes(outputs.scales, x.shape[1], Uint32(0), atom, neighbour == 0, row)

    @cute.jit
    def quantise_whole(
        self,
        x: cute.Tensor,
        outputs: Outputs,
        scaling: Scaling,
        sTops: cute.Tensor,
        row: Row,
    ) -> None:
        """Quantise whole rows: find their amax first, of tiles that stay in registers, and of
        others."""
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        warp, neighbour = thread // hw.WARP_THREADS, thread % config.neighbours
        step, kept, top = config.threads // config.whole, [], Uint32(0)
        first = warp * config.neighbours + neighbour
        end = ceil_div(x.shape[1], config.format.block * config.columns) * config.neighbours
        for index in cutlass.range_constexpr(config.kept):
            kept.append(self.empty_part())
            self.load_part(x, first + index * step, row, kept[index])
        for index in cutlass.range_constexpr(config.kept):
            for block in cutlass.range_constexpr(config.unrolled):
                top = cutlass.max(top, largest_half(kept[index][None, block]))
        for mine in cutlass.range(first + config.kept * step, end, step, unroll=1):
            loaded = self.empty_part()
            self.load_part(x, mine, row, loaded)
            for block in cutlass.range_constexpr(config.unrolled):
                top = cutlass.max(top, largest_half(loaded[None, block]))
        for shift in (1, 2, 4, 8, 16)[: 5 - config.whole // 2]:
            top = cutlass.max(top, cute.arch.shuffle_sync_bfly(top, shift))
        mine = thread % hw.WARP_THREADS // config.neighbours
        if neighbour == 0:
            sTops[mine, warp] = Int32(top)
        cute.arch.sync_threads()
        bits = sTops[mine, 0]
        for other in cutlass.range_constexpr(1, config.warps):
            bits = cutlass.max(bits, sTops[mine, other])
        g = self.encode_scale(bits)
        self.note(scaling, g, warp == 0 and neighbour == 0, row)
        for index in cutlass.range_constexpr(config.kept):
            self.quantise_part(x, outputs, g, first + index * step, kept[index], row)
        for mine in cutlass.range(first + config.kept * step, end, step, unroll=1):
            loaded = self.empty_part()
            self.load_part(x, mine, row, loaded)
            self.quantise_part(x, outputs, g, mine, loaded, row)

    @cute.jit
    def encode_scale(self, bits: Int32) -> Float32:
        """Return the global scale from the bits of an amax."""
        amax = float_of_half(Uint32(bits), TYPES[self.config.dtype])
        return encode_scale_of(amax, self.config.format)

    @cute.jit
    def targets(self, rows: cute.Tensor | None, row: Int32, is_row: Boolean) -> cute.Tensor:
        """Return the rows of the result that a row becomes, in registers."""
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
        """Return the word at which a row's scale factors begin. word: of the row in an atom."""
        atoms = ceil_div(x.shape[1], self.config.format.block * SCALE_COLUMNS)
        begin = Int64(block) * atoms * SCALE_ROWS + word
        if cutlass.const_expr(self.config.scattered):
            begin = Int64(row) * (ceil_div(atoms, CODE_WORDS) * CODE_WORDS)
        return begin

    @cute.jit
    def empty_part(self) -> cute.Tensor:
        """Registers for a thread's part of a row in a tile: elements by blocks."""
        config = self.config
        shape = (config.format.block, config.unrolled)
        return cute.make_rmem_tensor(shape, TYPES[config.dtype])

    @cute.jit
    def load_part(self, x: cute.Tensor, mine: Int32, row: Row, loaded: cute.Tensor) -> None:
        """Load a part of a row into registers; zeros if there is none."""
        block, unrolled = self.config.format.block, self.config.unrolled
        loaded.fill(0.0)
        for index in cutlass.range_constexpr(unrolled):
            here = mine * unrolled + index
            if row.exists and here < x.shape[1] // block:
                source = cute.local_tile(x[row.source, None], (block,), (here,))
                cute.autovec_copy(source, loaded[None, index])
        cute.arch.sync_warp()  # otherwise ptxas interleaves loads with uses of earlier loads

    @cute.jit
    def quantise_part(
        self,
        x: cute.Tensor,
        outputs: Outputs,
        g: Float32 | None,
        mine: Int32,
        loaded: cute.Tensor,
        row: Row,
    ) -> None:
        """Quantise a part of a row, and store it with the words of scale factors that contain it.

        Args:
            g: the global scale.
            mine: index of the part, `unrolled` scale factors each. Neighbouring threads have
                neighbouring parts.
        """
        config, is_row = self.config, row.exists
        columns, first = x.shape[1] // config.format.block, mine * config.unrolled
        words, codes = cute.make_rmem_tensor((config.words, config.unrolled), Uint32), Uint32(0)
        for index in cutlass.range_constexpr(config.unrolled):
            values = cute.make_rmem_tensor(config.format.block, Float32)
            values.store(loaded[None, index].load().to(Float32))
            amax = float_of_half(largest_half(loaded[None, index]), TYPES[config.dtype])
            found, code = quantise_block(values, g, config.format, self.arch, amax)
            for word in cutlass.range_constexpr(config.words):
                words[word, index] = found[word]
            if is_row and first + index < columns:
                codes |= code << Uint32(8 * index)
                if cutlass.const_expr(not config.wide):
                    self.store(outputs.data, row.targets, words[None, index], first + index)
        if cutlass.const_expr(config.wide):
            if is_row and first < columns:
                self.store(outputs.data, row.targets, words, mine)
        lanes = SCALE_COLUMNS // config.unrolled  # lanes that share a word of scale factors
        codes = gathered(codes << Uint32(8 * config.unrolled * (mine % lanes)), lanes)
        self.store_codes(outputs.scales, x.shape[1], codes, mine // lanes, mine % lanes == 0, row)

    @cute.jit
    def store(
        self, data: cute.Tensor, targets: cute.Tensor, words: cute.Tensor, column: Int32
    ) -> None:
        """Store words of elements to all of their rows. column: in units of the words."""
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
        """Store a word of scale factors: zeros if there is no row.

        Args:
            atom: index of the atom in the row.
            writes: whether this thread writes the word.
        """
        config = self.config
        writes = writes and atom < ceil_div(k, config.format.block * SCALE_COLUMNS)
        step = SCALE_ROWS
        if cutlass.const_expr(config.scattered):  # only existing rows have room, word by word
            writes, step = writes and row.exists, 1
        if writes:
            scales[row.codes + Int64(atom) * step] = Int32(codes)

    @cute.jit
    def global_scale(
        self, scaling: Scaling | None, sTops: cute.Tensor | None, row: Row
    ) -> Float32 | None:
        """Return the global scale of a row, in all threads of the CTA; None in a format without."""
        config = self.config
        if cutlass.const_expr(scaling is None):
            return None
        if cutlass.const_expr(config.scaling == "tensor"):
            thread, _, _ = cute.arch.thread_idx()
            parts = scaling.given
            tops = cute.make_rmem_tensor(-(-CTAS_OF_AMAX // config.threads), Int32)
            tops.fill(0)
            for index in cutlass.range_constexpr(cute.size(tops)):
                if thread + index * config.threads < cute.size(parts):
                    tops[index] = parts[thread + index * config.threads]
            bits = tops[0]
            for index in cutlass.range_constexpr(1, cute.size(tops)):
                bits = cutlass.max(bits, tops[index])
            bits = cute.arch.warp_redux_sync(bits, "max")
            if thread % hw.WARP_THREADS == 0:
                sTops[0, thread // hw.WARP_THREADS] = bits
            cute.arch.sync_threads()
            for warp in cutlass.range_constexpr(config.warps):
                bits = cutlass.max(bits, sTops[0, warp])
            return self.encode_scale(bits)
        index = Int32(0)
        if cutlass.const_expr(config.of_rows):
            index = row.number if row.exists else Int32(0)
        return scaling.given[index]

    @cute.jit
    def note(self, scaling: Scaling | None, g: Float32 | None, is_first: Boolean, row: Row) -> None:
        """Store the global scale of a row and its inverse, in the first thread of the row."""
        if cutlass.const_expr(scaling is not None):
            writes = row.exists and is_first
            if cutlass.const_expr(not self.config.of_rows):
                writes = writes and row.number == 0
            if writes:
                scaling.encode[row.number], scaling.decode[row.number] = g, Float32(1.0) / g


@cute.jit
def gathered(word: Uint32, lanes: cutlass.Constexpr[int]) -> Uint32:
    """Return the combined bits of 1, 2 or 4 neighbouring lanes, in each of them."""
    for step in (1, 2):
        if cutlass.const_expr(step < lanes):
            word |= cute.arch.shuffle_sync_bfly(word, step)
    return word


def host_function(config: QuantiseConfig, arch: str) -> tuple:
    """Return the host function to compile for `config`, and example arguments."""
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
        given = None
        if config.scaling != "token":
            given = fake_tensor(Int32 if config.scaling == "tensor" else Float32, cute.sym_int32())
        scaling = given, *(fake_tensor(Float32, cute.sym_int32()) for _ in range(2))
    inputs, grid = (x, table, offsets), (Int32(0), Int32(0))
    return Quantise(config, arch), inputs, (data, scales), scaling, grid, CUstream(0)
