"""Where a row of the output goes: numbers, or elements and scale factors (device code)."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint8, Uint16, Uint32

from kernelkit import hw
from moe.config import GroupedConfig
from moe.device.quantise import bits_of, quantise_block
from moe.formats import SCALE_ATOM_BYTES, SCALE_COLUMNS
from moe.sm100.args import Tensors
from moe.sm100.signature import OUT_TYPES

WORDS = {1: Uint8, 2: Uint16, 4: Uint32}  # by their bytes


@dataclass(frozen=True)
class Place:
    """A row of a tile. block: of 128 rows of its scale factors, line: of that block; column: of the
    output, the first of the tile."""

    row: Int32
    block: Int32
    line: Int32
    column: Int32


@cute.jit
def store_values(
    config: cutlass.Constexpr[GroupedConfig],
    tensors: Tensors,
    place: Place,
    where: tuple,
    values: cute.Tensor,
) -> None:
    """fp32 of neighbouring columns, rounded; where: (the first, from the tile's; row exists)."""
    first, exists = where
    element = OUT_TYPES[config.out]
    piece = hw.TMA_ALIGN_BYTES * 8 // element.width
    rounded = cute.make_rmem_tensor(cute.size(values), element)
    rounded.store(values.load().to(element))
    for index in cutlass.range_constexpr(cute.size(values) // piece):
        column = place.column + first + index * piece
        if exists & (column < cute.size(tensors.out, mode=[1])):
            _put(tensors.out, place.row, column, _part(rounded, index * piece, piece))


@cute.jit
def store_quantised(
    config: cutlass.Constexpr[GroupedConfig],
    tensors: Tensors,
    place: Place,
    where: tuple,
    numbers: tuple,
) -> None:
    """numbers: (fp32 of neighbouring columns, the codes of the tile's scale factors)."""
    (first, exists), (values, codes) = where, numbers
    form = config.out_format
    encode = None
    if cutlass.const_expr(form.has_global):
        encode = tensors.encode_scale[0]
    for index in cutlass.range_constexpr(cute.size(values) // form.block):
        part = _part(values, index * form.block, form.block)
        words, code = quantise_block(part, encode, form, "sm_100a")
        codes[first // form.block + index] = code
        column = (place.column + first + index * form.block) // form.per_byte
        if exists & (column < cute.size(tensors.out, mode=[1])):
            data = cute.recast_tensor(words, Uint8)
            _put(tensors.out, place.row, column, data)


@cute.jit
def store_codes(
    config: cutlass.Constexpr[GroupedConfig],
    tensors: Tensors,
    place: Place,
    exists: Boolean,
    codes: cute.Tensor,
) -> None:
    """The scale factors of a tile, those of an atom together, or of the part that the tile has.

    Columns behind the last one were computed from zeros, so that their codes are 0, as they have to
    be where they share an atom.
    """
    form = config.out_format
    in_tile = config.tile_outputs // form.block
    count = min(in_tile, SCALE_COLUMNS)
    columns = cute.size(tensors.out, mode=[1]) * form.per_byte // form.block
    atoms = (columns + SCALE_COLUMNS - 1) // SCALE_COLUMNS
    line = place.line % hw.WARP_THREADS * 16 + place.line // hw.WARP_THREADS * SCALE_COLUMNS
    for first in cutlass.range_constexpr(0, in_tile, count):
        column = place.column // form.block + first
        word = Uint32(0)
        for index in cutlass.range_constexpr(count):
            word |= codes[first + index] << (8 * index)
        atom = place.block * atoms + column // SCALE_COLUMNS
        offset = atom * SCALE_ATOM_BYTES + line + column % SCALE_COLUMNS
        if exists & (column < atoms * SCALE_COLUMNS):
            start = cute.recast_ptr(
                (tensors.out_scales.iterator + offset).align(count), dtype=WORDS[count]
            )
            cute.make_tensor(start, cute.make_layout(1))[0] = WORDS[count](word)


@cute.jit
def tell_amax(amax: cute.Tensor, top: Float32) -> None:
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


def _part(values: cute.Tensor, first: int, count: int) -> cute.Tensor:
    """Neighbours of a register tensor."""
    return cute.make_tensor(values.iterator + first, cute.make_layout(count))


@cute.jit
def _put(out: cute.Tensor, row: Int32, column: Int32, values: cute.Tensor) -> None:
    """Neighbouring columns of a row, 16 bytes at a time or as many as there are."""
    nbytes = cute.size(values) * values.element_type.width // 8
    start = (out[row, None].iterator + column).align(min(nbytes, hw.TMA_ALIGN_BYTES))
    cute.autovec_copy(values, cute.make_tensor(start, cute.make_layout(cute.size(values))))
