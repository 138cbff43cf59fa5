"""Where a row of the output goes: numbers, or elements and scale factors (device code).

Either becomes words of 32 bits in a thread's registers. A thread with a long row to itself hands it
over to its warp in pieces, through shared memory: lanes beside each other then write neighbouring
units of 16 bytes, so that whole sectors of 32 bytes leave the SM. TMA stores whole boxes only, and
the rows behind an expert's last one are another expert's.
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint8, Uint16, Uint32

from kernelkit.device.boxes import swizzled
from kernelkit.device.words import bits_of
from kernelkit.plan import hw
from moe.config import GroupedConfig
from moe.formats import SCALE_ATOM_BYTES, SCALE_COLUMNS
from moe.shared.quantise import quantise_block
from moe.sm100.args import Tensors
from moe.sm100.plan import PIECE_BYTES
from moe.sm100.signature import OUT_TYPES

CODES = {1: Uint8, 2: Uint16, 4: Uint32}  # that are stored together, by how many they are
UNIT_WORDS = hw.SMEM_UNIT_BYTES // 4
PIECE_WORDS = PIECE_BYTES // 4


@dataclass(frozen=True)
class Place:
    """Neighbouring columns of a row. end: behind the last row that the expert has; block: of 128
    rows of its scale factors, line: of that block; column: of the output, the first."""

    row: Int32
    end: Int32
    block: Int32
    line: Int32
    column: Int32

    @property
    def exists(self) -> Boolean:
        """Whether the row does."""
        return self.row < self.end

    def moved(self, columns: Int32) -> "Place":
        """So many columns on."""
        return replace(self, column=self.column + columns)


@dataclass(frozen=True)
class Encoded:
    """Outputs of a row as they are stored, Uint32 in registers: words of elements, and the codes of
    scale factors, None where there are none."""

    words: cute.Tensor
    codes: cute.Tensor | None

    def share(self, index: int, count: int) -> "Encoded":
        """One of `count` equal parts."""
        parts = (
            None if each is None else part_of(each, *_range(cute.size(each), index, count))
            for each in (self.words, self.codes)
        )
        return Encoded(*parts)

    def completed(self, index: int, count: int) -> range:
        """The pieces that are complete with part `index` of `count`, and were not before."""
        size = cute.size(self.words)
        words = min(PIECE_WORDS, size)
        return range(size * index // count // words, size * (index + 1) // count // words)

    def piece(self, index: int) -> cute.Tensor:
        """Words that the warp stores together."""
        words = min(PIECE_WORDS, cute.size(self.words))
        return part_of(self.words, index * words, words)


def first_byte(config: GroupedConfig, place: Place) -> Int32:
    """Of the place, in its row of the output."""
    return place.column * config.output_bits // 8


@cute.jit
def rounded(config: cutlass.Constexpr[GroupedConfig], values: cute.Tensor) -> cute.Tensor:
    """fp32 of neighbouring columns as words of the output."""
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
    """fp32 of whole blocks as words of the output; codes: of their scale factors, is written."""
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
    """Words of the place's row, from byte `first` of it on, 16 bytes at a time or fewer."""
    count = min(cute.size(words), UNIT_WORDS)
    for index in cutlass.range_constexpr(0, cute.size(words), count):
        _put(tensors.out, place.row, place.end, first + 4 * index, part_of(words, index, count))


@cute.jit
def hand_over(
    tensors: Tensors, place: Place, first: Int32, words: cute.Tensor, buffer: cute.Pointer
) -> None:
    """The same by all lanes of a warp, which have neighbouring rows. words: of a piece at most.
    buffer: bytes of shared memory of the warp, PIECE_BYTES for every row."""
    lane = cute.arch.lane_idx()
    units = cute.size(words) // UNIT_WORDS
    for unit in cutlass.range_constexpr(units):
        own = _unit(buffer, lane, unit)
        cute.autovec_copy(part_of(words, unit * UNIT_WORDS, UNIT_WORDS), own)
    cute.arch.sync_warp()
    rows = hw.WARP_THREADS // units  # that the warp stores at a time
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
    """The scale factors of a place, those of an atom together, or of the part that it has.

    Columns behind the last one were computed from zeros, so that their codes are 0, as they have to
    be where they share an atom.
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
    """The largest of all threads: numbers that are not negative are in the order of their bits."""
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
    """Neighbours of a register tensor."""
    return cute.make_tensor(values.iterator + first, cute.make_layout(count))


def _range(size: int, index: int, count: int) -> tuple[int, int]:
    """(begin, length) of an equal part."""
    return size // count * index, size // count


def _unit(buffer: cute.Pointer, line: Int32, unit: Int32) -> cute.Tensor:
    """16 bytes of shared memory, swizzled: 8 lanes that move theirs meet all banks."""
    offset = swizzled(line * PIECE_BYTES + unit * hw.SMEM_UNIT_BYTES, PIECE_BYTES)
    start = cute.recast_ptr((buffer + offset).align(hw.SMEM_UNIT_BYTES), dtype=Uint32)
    return cute.make_tensor(start, cute.make_layout(UNIT_WORDS))


@cute.jit
def _put(out: cute.Tensor, row: Int32, end: Int32, byte: Int32, words: cute.Tensor) -> None:
    """Neighbouring words of a row, where there are such a row and such columns."""
    width = out.element_type.width // 8
    if (row < end) & (byte < cute.size(out, mode=[1]) * width):
        start = cute.recast_ptr(out[row, None].iterator, dtype=Uint8) + byte
        start = cute.recast_ptr(start.align(4 * cute.size(words)), dtype=Uint32)
        cute.autovec_copy(words, cute.make_tensor(start, cute.make_layout(cute.size(words))))
