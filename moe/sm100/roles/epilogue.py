"""Epilogue role: four warps, a row of the tile per thread: global scale, bias, SwiGLU, output.

Data move from tensor memory to registers to global memory. A subtile holds whole pairs of gate and
up and whole blocks of a quantised output, so that no state is carried to the next one (except with
a `turn` of a few columns). In a swapped tile, a lane of tensor memory is a column of the product.
The tile is transposed through shared memory, and a thread then processes subtiles of rows.
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint8, Uint16, Uint32

from kernelkit.device import tmem
from kernelkit.device.boxes import swizzled
from kernelkit.device.dependent import follow
from kernelkit.device.pipelines import consumer_state
from kernelkit.device.words import bits_of
from kernelkit.plan import hw
from moe.config import CARRIED, PART, GroupedConfig
from moe.formats import SCALE_ATOM_BYTES, SCALE_COLUMNS
from moe.kernel_arguments import Tensors
from moe.shared.quantise import largest_magnitude, quantise_block
from moe.shared.swiglu import gate_weight, swiglu, weighted_up
from moe.sm100.args import OUT_TYPES, Scope, Tile
from moe.sm100.plan import LANES, PIECE_BYTES, ROLES, TILE_STAGES, GroupedPlan
from moe.sm100.roles.scheduler import rank_in_tile, take_tile

# ---- Linear part of the epilogue: global scale, bias of the column

BIAS_BYTES = 4
VECTOR = 4  # columns whose biases are loaded together; N is a multiple of it


@dataclass(frozen=True)
class Affine:
    """Factor and biases that are applied to the products of a row."""

    factor: Float32  # factor of the row, or of its gate columns if `up` is set
    up: Float32 | None = None  # factor of its up columns, if it differs
    biases: Int64 | None = None  # address of the biases of neighbouring columns; None: no bias
    left: Int32 | None = None  # number of columns up to the last one; may be below 1

    def factor_of(self, config: GroupedConfig, column: int) -> Float32:
        """Return the factor of a column. Columns are counted from one at which gate begins."""
        if self.up is None or column // config.granularity % 2 == 0:
            return self.factor
        return self.up

    def moved(self, columns: Int32) -> "Affine":
        """Advance by `columns` columns, a whole number of gate and up pairs."""
        if self.biases is None:
            return self
        biases = self.biases + BIAS_BYTES * columns
        return Affine(self.factor, self.up, biases, self.left - columns)


@dataclass(frozen=True)
class OfColumn:
    """Factor and bias of a thread's column of the product. The rows share the factor."""

    factor: Float32
    bias: Float32


@cute.jit
def affine_at(affine: Affine, bias: cute.Tensor, column: Int32) -> Affine:
    """Add the biases of an expert, fp32 [N], from packed column `column` on."""
    first = Affine(affine.factor, affine.up, bias.iterator.toint(), cute.size(bias))
    return first.moved(column)


@cute.jit
def apply(
    config: cutlass.Constexpr[GroupedConfig],
    affine: Affine,
    values: cute.Tensor,
    first: cutlass.Constexpr[int],
) -> None:
    """Apply factors and biases in place. values: fp32 of neighbouring columns, from the `first` one
    of `affine` on."""
    if cutlass.const_expr(affine.biases is None and affine.up is None):
        values.store(values.load() * affine.factor)
    elif cutlass.const_expr(affine.biases is None):
        for index in cutlass.range_constexpr(cute.size(values)):
            values[index] = values[index] * affine.factor_of(config, first + index)
    else:
        for begin in cutlass.range_constexpr(0, cute.size(values), VECTOR):
            bias = bias_at(affine, first + begin)
            for index in cutlass.range_constexpr(0, VECTOR, 2):
                at = begin + index
                factor = affine.factor_of(config, first + at)
                factors = factor, factor
                values[at], values[at + 1] = cute.arch.fma_packed_f32x2(
                    (values[at], values[at + 1]), factors, (bias[index], bias[index + 1])
                )


@cute.jit
def bias_at(affine: Affine, first: cutlass.Constexpr[int]) -> tuple[Float32, ...]:
    """Load the biases of four neighbouring columns. They are 0 past the last column, so that the
    sums there stay 0.

    The load has a predicate instead of a branch, so that many loads are in flight at a time. It is
    not `.nc`: ptxas moves all loads of read-only memory to the start of a tile, and spills the
    results.
    """
    begin = " ".join(f"mov.f32 b{index}, 0f00000000;" for index in range(VECTOR))
    end = " ".join(f"mov.f32 {{$w{index}}}, b{index};" for index in range(VECTOR))
    return cute.arch.inline_ptx(
        f"{{ .reg .pred exists; .reg .f32 b<{VECTOR}>; {begin} "
        f"setp.gt.s32 exists, {{$r1}}, {first}; @exists ld.global.v4.f32 {{b0, b1, b2, b3}}, "
        f"[{{$r0}}+{BIAS_BYTES * first}]; {end} }}",
        write_only_types=[Float32] * VECTOR,
        read_only_args=[affine.biases, affine.left],
    )


# ---- Stores of a row of the output: numbers, or elements and scale factors
#
# Both become words of 32 bits in registers. If a thread has a long row, its warp stores the row in
# pieces, through shared memory: neighbouring lanes then write neighbouring units of 16 bytes, so
# that whole sectors of 32 bytes leave the SM. TMA stores whole boxes only, and the rows after an
# expert's last one are another expert's.

CODES = {1: Uint8, 2: Uint16, 4: Uint32}  # number of codes stored together -> their type
UNIT_WORDS = hw.SMEM_UNIT_BYTES // 4
PIECE_WORDS = PIECE_BYTES // 4


@dataclass(frozen=True)
class Place:
    """Neighbouring columns of a row."""

    row: Int32
    end: Int32  # end of the expert's rows (exclusive)
    block: Int32  # block of 128 rows of the expert's scale factors
    line: Int32  # line of that block
    column: Int32  # first column of the output

    @property
    def exists(self) -> Boolean:
        """Whether the row exists."""
        return self.row < self.end

    def moved(self, columns: Int32) -> "Place":
        """Advance by `columns` columns."""
        return replace(self, column=self.column + columns)


@dataclass(frozen=True)
class Encoded:
    """Outputs of a row as they are stored, Uint32 in registers: words of elements, and codes of
    scale factors or None."""

    words: cute.Tensor
    codes: cute.Tensor | None

    def share(self, index: int, count: int) -> "Encoded":
        """Return part `index` of `count` equal parts."""
        parts = (
            None if each is None else part_of(each, *_range(cute.size(each), index, count))
            for each in (self.words, self.codes)
        )
        return Encoded(*parts)

    def completed(self, index: int, count: int) -> range:
        """Return the pieces that part `index` of `count` completes."""
        size = cute.size(self.words)
        words = min(PIECE_WORDS, size)
        return range(size * index // count // words, size * (index + 1) // count // words)

    def piece(self, index: int) -> cute.Tensor:
        """Return the words of a piece, which the warp stores together."""
        words = min(PIECE_WORDS, cute.size(self.words))
        return part_of(self.words, index * words, words)


def first_byte(config: GroupedConfig, place: Place) -> Int32:
    """Return the first byte of the place in its row of the output."""
    return place.column * config.output_bits // 8


@cute.jit
def rounded(config: cutlass.Constexpr[GroupedConfig], values: cute.Tensor) -> cute.Tensor:
    """Round fp32 of neighbouring columns to words of the output."""
    result = cute.make_rmem_tensor(cute.size(values), OUT_TYPES[config.out])
    result.store(values.load().to(OUT_TYPES[config.out]))
    return cute.recast_tensor(result, Uint32)


@cute.jit
def quantised(
    config: cutlass.Constexpr[GroupedConfig],
    tensors: Tensors,
    values: cute.Tensor,
    codes: cute.Tensor,
) -> cute.Tensor:
    """Quantise fp32 of whole blocks to words of the output. Writes the codes of their scale
    factors."""
    form, encode = config.out_format, None
    if cutlass.const_expr(form.has_global):
        encode = tensors.encode_scale[0]
    blocks = cute.size(codes)
    result = cute.make_rmem_tensor(cute.size(values) // (4 * form.per_byte), Uint32)
    words = cute.size(result) // blocks
    for block in cutlass.range_constexpr(blocks):
        part = part_of(values, block * form.block, form.block)
        elements, codes[block] = quantise_block(part, encode, form, "sm_100a")
        part_of(result, block * words, words).store(elements.load())
    return result


@cute.jit
def store_row(tensors: Tensors, place: Place, first: Int32, words: cute.Tensor) -> None:
    """Store words of the place's row, from byte `first` of it on, at most 16 bytes at a time."""
    count = min(cute.size(words), UNIT_WORDS)
    for index in cutlass.range_constexpr(0, cute.size(words), count):
        _put(tensors.out, place.row, place.end, first + 4 * index, part_of(words, index, count))


@cute.jit
def hand_over(
    tensors: Tensors, place: Place, first: Int32, words: cute.Tensor, buffer: cute.Pointer
) -> None:
    """Store words of neighbouring rows, one row per lane, with all lanes of a warp together.

    Args:
        place, first: as of `store_row`.
        words: words of this lane's row, at most a piece.
        buffer: bytes of shared memory of the warp, PIECE_BYTES for every row.
    """
    lane = cute.arch.lane_idx()
    units = cute.size(words) // UNIT_WORDS
    for unit in cutlass.range_constexpr(units):
        own = _unit(buffer, lane, unit)
        cute.autovec_copy(part_of(words, unit * UNIT_WORDS, UNIT_WORDS), own)
    cute.arch.sync_warp()
    rows = hw.WARP_THREADS // units  # rows that the warp stores at a time
    for begin in cutlass.range_constexpr(0, hw.WARP_THREADS, rows):
        line, unit = begin + lane // units, lane % units
        moved = cute.make_rmem_tensor(UNIT_WORDS, Uint32)
        cute.autovec_copy(_unit(buffer, line, unit), moved)
        byte = first + unit * hw.SMEM_UNIT_BYTES
        _put(tensors.out, place.row - lane + line, place.end, byte, moved)
    cute.arch.sync_warp()


@cute.jit
def store_codes(
    config: cutlass.Constexpr[GroupedConfig], tensors: Tensors, place: Place, codes: cute.Tensor
) -> None:
    """Store the scale factors of a place, those of an atom (or of its part of one) together.

    Columns past the last one were computed from zeros. So their codes are 0, as required if they
    share an atom.
    """
    form = config.out_format
    count = min(cute.size(codes), SCALE_COLUMNS)
    columns = cute.size(tensors.out, mode=[1]) * form.per_byte // form.block
    atoms = (columns + SCALE_COLUMNS - 1) // SCALE_COLUMNS
    line = place.line % hw.WARP_THREADS * 16 + place.line // hw.WARP_THREADS * SCALE_COLUMNS
    for first in cutlass.range_constexpr(0, cute.size(codes), count):
        column = place.column // form.block + first
        word = Uint32(0)
        for index in cutlass.range_constexpr(count):
            word |= codes[first + index] << (8 * index)
        atom = place.block * atoms + column // SCALE_COLUMNS
        offset = atom * SCALE_ATOM_BYTES + line + column % SCALE_COLUMNS
        if place.exists & (column < atoms * SCALE_COLUMNS):
            start = cute.recast_ptr(
                (tensors.out_scales.iterator + offset).align(count), dtype=CODES[count]
            )
            cute.make_tensor(start, cute.make_layout(1))[0] = CODES[count](word)


@cute.jit
def reduce_amax(amax: cute.Tensor, top: Float32) -> None:
    """Reduce to the largest of all threads: bits of non-negative numbers are ordered as the
    numbers."""
    bits = bits_of(top)
    for distance in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_bfly(bits, offset=1 << distance)
        bits = cutlass.max(bits, other)
    if cute.arch.lane_idx() == 0:
        cute.arch.inline_ptx(
            "red.relaxed.gpu.global.max.u32 [{$r0}], {$r1};",
            read_only_args=[amax.iterator.toint(), bits],
        )


def part_of(values: cute.Tensor, first: int, count: int) -> cute.Tensor:
    """Return `count` neighbours of a register tensor."""
    return cute.make_tensor(values.iterator + first, cute.make_layout(count))


def _range(size: int, index: int, count: int) -> tuple[int, int]:
    """Return (begin, length) of an equal part."""
    return size // count * index, size // count


def _unit(buffer: cute.Pointer, line: Int32, unit: Int32) -> cute.Tensor:
    """Return 16 bytes of shared memory, swizzled: 8 lanes that access theirs use all banks."""
    offset = swizzled(line * PIECE_BYTES + unit * hw.SMEM_UNIT_BYTES, PIECE_BYTES)
    start = cute.recast_ptr((buffer + offset).align(hw.SMEM_UNIT_BYTES), dtype=Uint32)
    return cute.make_tensor(start, cute.make_layout(UNIT_WORDS))


@cute.jit
def _put(out: cute.Tensor, row: Int32, end: Int32, byte: Int32, words: cute.Tensor) -> None:
    """Store neighbouring words of a row, if row and columns exist."""
    width = out.element_type.width // 8
    if (row < end) & (byte < cute.size(out, mode=[1]) * width):
        start = cute.recast_ptr(out[row, None].iterator, dtype=Uint8) + byte
        start = cute.recast_ptr(start.align(4 * cute.size(words)), dtype=Uint32)
        cute.autovec_copy(words, cute.make_tensor(start, cute.make_layout(cute.size(words))))


# ---- The role

TRANSPOSED_BARRIER = 1
BIASED = 16  # most columns of gate, then of up, with biases in registers
AT_ONCE = 32  # outputs that a thread then stores: a block of any format
READ_COLUMNS = 32  # columns of a swapped accumulator in a thread's registers


class Epilogue:
    """Empties the accumulators."""

    def __init__(self, plan: GroupedPlan) -> None:
        self.plan = plan
        self.role = ROLES["epilogue"]

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warps."""
        pipes, plan = scope.pipes, self.plan
        if cutlass.const_expr(plan.config.w_ready):
            follow()  # do not overwrite what the previous kernel still reads
        tiles, acc = consumer_state(TILE_STAGES), consumer_state(plan.acc_stages)
        half, top = Int32(0), Float32(0.0)  # accumulator stage; largest magnitude
        going = Int32(1)
        while going > 0:
            tile = take_tile(scope, pipes.tile_epilogue, tiles)
            tiles.advance()
            going = tile.valid
            if going > 0:
                of_column = self.of_column(scope, tile)  # meanwhile: loads from global memory
                pipes.acc.wait(acc)
                tmem.order_after_wait()
                if cutlass.const_expr(plan.config.swapped):
                    found = self.do_swapped(scope, tile, half, acc.index, of_column)
                else:
                    found = self.do_tile(scope, tile, half, acc.index)
                top = cute.arch.fmax(top, found, nan=True)
                acc.advance()
                half = 1 - half
        if cutlass.const_expr(plan.config.amax):
            reduce_amax(scope.tensors.amax, top)

    @cute.jit
    def do_tile(self, scope: Scope, tile: Tile, half: Int32, stage: Int32) -> Float32:
        """Process a row per thread, all columns; return the largest magnitude, if requested."""
        plan, config = self.plan, self.plan.config
        thread, _, _ = cute.arch.thread_idx()
        rank = rank_in_tile(plan)
        place = Place(
            tile.first + rank * LANES + thread,
            tile.first + tile.rows,
            tile.block + rank,
            thread,
            tile.n * config.tile_outputs,
        )
        affine = self.affine(scope, tile, place)
        top = Float32(0.0)
        for index in cutlass.range_constexpr(plan.parts):
            # Columns that the accumulators share come first.
            part = index if half == 1 else plan.parts - 1 - index
            column, frees = half * plan.second + part * PART, index == self.frees
            outputs = place.moved(part * (PART // config.inputs_of_output))
            found = self.do_part(scope, outputs, column, stage, frees, affine.moved(part * PART))
            top = cute.arch.fmax(top, found, nan=True)
        return top

    @property
    def frees(self) -> int:
        """Part of an accumulator after which it is released."""
        return 0 if self.plan.shares_columns else self.plan.parts - 1

    @cute.jit
    def do_part(
        self,
        scope: Scope,
        place: Place,
        column: Int32,
        stage: Int32,
        frees: cutlass.Constexpr[bool],
        affine: Affine,
    ) -> Float32:
        """Process columns of a thread's row, from `column` of the accumulator on. frees: whether to
        release `stage` of the accumulator after them."""
        config = self.plan.config
        row, count = self.room(PART), PART // config.inputs_of_output // self.outputs
        top = Float32(0.0)
        for subtile in cutlass.range_constexpr(count):
            if cutlass.const_expr(self.turn > 0):
                values = self.carried(scope, column, subtile * self.outputs, affine)
            else:
                first = subtile * config.subtile
                values = self.decoded(scope, column, first, config.subtile, affine)
                values = self.activated(scope, values)
            if cutlass.const_expr(frees and subtile == count - 1):
                tmem.order_before_signal()
                scope.pipes.acc.release(stage)
            top = cute.arch.fmax(top, self.magnitude(place, values), nan=True)
            self.encode(scope, values, row.share(subtile, count))
            for piece in row.completed(subtile, count):
                self.hand_over(scope, place, row, piece)
        if cutlass.const_expr(config.out_format is not None):
            store_codes(config, scope.tensors, place, row.codes)
        return top

    @cute.jit
    def do_swapped(
        self, scope: Scope, tile: Tile, half: Int32, stage: Int32, of_column: OfColumn
    ) -> Float32:
        """Process one or several subtiles of a row per thread."""
        plan, config = self.plan, self.plan.config
        self.transpose(scope, half * plan.second, stage, of_column)
        thread, _, _ = cute.arch.thread_idx()
        parts = config.tile_n // config.subtile
        top = Float32(0.0)
        for turn in cutlass.range_constexpr(-(-plan.n * parts // LANES)):
            item = turn * LANES + thread
            row, part = item % plan.n, cutlass.min(item // plan.n, parts - 1)
            place = Place(
                tile.first + row,
                tile.first + tile.rows if item < plan.n * parts else Int32(0),
                tile.block,
                tile.quarter * hw.WARP_THREADS + row,
                tile.n * config.tile_outputs + part * config.subtile_outputs,
            )
            values = cute.make_rmem_tensor(config.subtile, Float32)
            source = scope.buffers.transposed[row, None].iterator + part * config.subtile
            cute.autovec_copy(cute.make_tensor(source.align(16), values.layout), values)
            if cutlass.const_expr(not self.by_column):
                apply(config, self.affine(scope, tile, place), values, 0)
            values = self.activated(scope, values)
            top = cute.arch.fmax(top, self.magnitude(place, values), nan=True)
            room = self.room(config.subtile)
            self.encode(scope, values, room)
            store_row(scope.tensors, place, first_byte(config, place), room.words)
            if cutlass.const_expr(config.out_format is not None):
                store_codes(config, scope.tensors, place, room.codes)
        return top

    @cute.jit
    def transpose(self, scope: Scope, column: Int32, stage: Int32, of_column: OfColumn) -> None:
        """Write the accumulator to shared memory, once the previous tile there has been read."""
        plan = self.plan
        thread, _, _ = cute.arch.thread_idx()
        cute.arch.barrier(barrier_id=TRANSPOSED_BARRIER, number_of_threads=self.role.threads)
        count = min(plan.n, READ_COLUMNS)
        for first in cutlass.range_constexpr(0, plan.n, count):
            values = self.columns(scope, column + first, count)
            for index in cutlass.range_constexpr(count):
                value = values[index]
                if cutlass.const_expr(self.by_column):
                    value = value * of_column.factor + of_column.bias
                scope.buffers.transposed[first + index, thread] = value
        tmem.order_before_signal()
        scope.pipes.acc.release(stage)
        cute.arch.barrier(barrier_id=TRANSPOSED_BARRIER, number_of_threads=self.role.threads)

    @cute.jit
    def columns(self, scope: Scope, first: Int32, count: cutlass.Constexpr) -> cute.Tensor:
        """Load `count` fp32 columns of the thread's lane of tensor memory."""
        thread, _, _ = cute.arch.thread_idx()
        values = cute.make_rmem_tensor(count, Float32)
        tmem.load_row(tmem.tile_at(scope.buffers.tmem, first, count), values, thread)
        tmem.wait_loads()
        return values

    @cute.jit
    def decoded(
        self,
        scope: Scope,
        column: Int32,
        first: cutlass.Constexpr,
        count: cutlass.Constexpr,
        affine: Affine,
    ) -> cute.Tensor:
        """Load `count` columns, and apply the global scale and the bias. `first` is added to
        `column`, and to the column of `affine`."""
        values = self.columns(scope, column + first, count)
        apply(self.plan.config, affine, values, first)
        return values

    @cute.jit
    def activated(self, scope: Scope, values: cute.Tensor) -> cute.Tensor:
        """Return the activation's output."""
        if cutlass.const_expr(self.plan.config.swiglu):
            values = swiglu(self.plan.config, scope.numbers, values)
        return values

    @property
    def turn(self) -> int:
        """Columns of gate, then of up, that `carried` processes at a time; 0: a whole subtile."""
        config = self.plan.config
        if config.carry:
            return CARRIED
        return BIASED if config.bias and config.granularity > BIASED else 0

    @property
    def outputs(self) -> int:
        """Number of outputs that a thread stores at a time: whole blocks."""
        outputs = self.plan.config.subtile_outputs
        return min(outputs, AT_ONCE) if self.turn else outputs

    @cute.jit
    def carried(
        self, scope: Scope, column: Int32, first: cutlass.Constexpr, affine: Affine
    ) -> cute.Tensor:
        """Return outputs from the `first` one on, few at a time: gate weights are kept for up."""
        config, numbers, turn = self.plan.config, scope.numbers, self.turn
        weights = cute.make_rmem_tensor(turn, Float32)
        result = cute.make_rmem_tensor(self.outputs, Float32)
        for begin in cutlass.range_constexpr(0, self.outputs, turn):
            at = (first + begin) // config.granularity * config.granularity + first + begin
            gate = self.decoded(scope, column, at, turn, affine)
            for index in cutlass.range_constexpr(turn):
                weights[index] = gate_weight(config, numbers, gate[index])
            up = self.decoded(scope, column, at + config.granularity, turn, affine)
            for index in cutlass.range_constexpr(turn):
                value = weighted_up(config, numbers, up[index], weights[index])
                result[begin + index] = value
        return result

    def room(self, columns: int) -> Encoded:
        """Allocate registers for the output of `columns` columns of the product."""
        config, form = self.plan.config, self.plan.config.out_format
        outputs = columns // config.inputs_of_output
        words = cute.make_rmem_tensor(outputs * config.output_bits // 32, Uint32)
        codes = cute.make_rmem_tensor(outputs // form.block, Uint32) if form else None
        return Encoded(words, codes)

    @cute.jit
    def encode(self, scope: Scope, values: cute.Tensor, room: Encoded) -> None:
        """Convert outputs to the form in which they are stored."""
        config = self.plan.config
        if cutlass.const_expr(config.out_format is None):
            room.words.store(rounded(config, values).load())
        else:
            room.words.store(quantised(config, scope.tensors, values, room.codes).load())

    @cute.jit
    def hand_over(self, scope: Scope, place: Place, row: Encoded, piece: cutlass.Constexpr) -> None:
        """Store a piece of the thread's row, by its warp."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        buffer = scope.buffers.pieces + warp * (hw.WARP_THREADS * PIECE_BYTES)
        first = first_byte(self.plan.config, place) + piece * PIECE_BYTES
        hand_over(scope.tensors, place, first, row.piece(piece), buffer)

    @cute.jit
    def magnitude(self, place: Place, values: cute.Tensor) -> Float32:
        """Return the largest magnitude of an existing row, if requested."""
        top = Float32(0.0)
        if cutlass.const_expr(self.plan.config.amax):
            top = largest_magnitude(values) if place.exists else top
        return top

    @property
    def by_column(self) -> bool:
        """Whether a thread has the factor and the bias of its column of a swapped tile."""
        return self.plan.config.swapped and not self.plan.config.row_scale

    @cute.jit
    def of_column(self, scope: Scope, tile: Tile) -> OfColumn:
        """Return factor and bias of the thread's column of a swapped tile."""
        tensors, config = scope.tensors, self.plan.config
        factor, bias = Float32(1.0), Float32(0.0)
        thread, _, _ = cute.arch.thread_idx()
        if cutlass.const_expr(self.by_column and config.format.has_global):
            factor = tensors.x_scale[0] * self.w_scale(scope, tile, thread)
        if cutlass.const_expr(self.by_column and config.bias):
            column = tile.n * config.tile_n + thread
            if column < cute.size(tensors.bias, mode=[1]):
                bias = tensors.bias[tile.expert, column]
        return OfColumn(factor, bias)

    @cute.jit
    def affine(self, scope: Scope, tile: Tile, place: Place) -> Affine:
        """Return the factors and biases of the row's products, which are applied before the
        activation."""
        tensors, config = scope.tensors, self.plan.config
        affine = Affine(Float32(1.0))
        if cutlass.const_expr(config.format.has_global):
            index = Int32(0)
            if cutlass.const_expr(config.row_scale):
                index = place.row if place.exists else Int32(0)
            x_scale, up = tensors.x_scale[index], None
            if cutlass.const_expr(config.pair_scale):
                up = x_scale * self.w_scale(scope, tile, Int32(config.granularity))
            affine = Affine(x_scale * self.w_scale(scope, tile, Int32(0)), up)
        if cutlass.const_expr(not config.bias):
            return affine
        column = place.column * config.inputs_of_output
        return affine_at(affine, tensors.bias[tile.expert, None], column)

    @cute.jit
    def w_scale(self, scope: Scope, tile: Tile, column: Int32) -> Float32:
        """Return the global scale of w for the expert and a column of the tile."""
        config, scale = self.plan.config, scope.tensors.w_scale
        if cutlass.const_expr(config.pair_scale):
            return scale[tile.expert, column // config.granularity % 2]
        return scale[tile.expert]
