"""The 128-byte CUtensorMap: decode, encode, and the fields that tensormap.replace rewrites.

The layout was found by encoding many tensors with the DSL's host code and comparing (word numbers
below are little-endian 32-bit words, and only the first 16 carry data):

    w0, w1     global address          w8..w12  size - 1 of dimensions 0..4 (elements)
    w2         rank, type, swizzle     w13      element strides - 1 (3 bits each), box[0] - 1 << 24
    w3..w6     stride of dimensions    w14      box[1..4] - 1, 8 bits each
               1..4 / 16, low 32 bits  w15      0
    w7         their high 4 bits

Bit 0 of w2 is the im2col mode: box[0] is then channels per pixel, w14 the corners of the bounding
box and w15 pixels per column - 1. A header of NVIDIA's that FlashInfer ships, with functions of its
own in place of the driver's (cudnn_sdpa, cudaSetTmaIm2ColDescriptor), has the same fields, and two
that the DSL's code never sets: out-of-bounds fill and L2 promotion, in w2.

Dimension 0 is the contiguous one everywhere. A bit combination that this table does not explain,
such as an interleaved layout or the wide im2col modes, of whose maps nothing is public, raises
UnsupportedPtx; what the driver or the TMA unit would reject raises HardwareRefusal.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import numpy as np

from ptxemu.errors import HardwareRefusal, UnsupportedPtx
from ptxemu.machine.im2col import MAX_CHANNELS, MIN_RANK, PixelBox, corners, require_box
from ptxemu.numerics import swizzle as swizzles
from ptxemu.numerics.swizzle import Swizzle

SIZE = 128
MAX_RANK = 5
MAX_BOX = 256
GATHERED_ROWS = 4
MAX_STRIDE = 1 << 40
_WORDS = struct.Struct("<16I")

# name: (type code in w2[10:7], bits of one element in global memory). Signed and unsigned integers
# of one width share a code, as do all one-byte types.
DTYPES: dict[str, tuple[int, int]] = {
    "u8": (0, 8),
    "u16": (1, 16),
    "u32": (2, 32),
    "u64": (4, 64),
    "f16": (6, 16),
    "f32": (7, 32),
    "tf32": (7, 32),  # the code of f32 plus _TF32: loads round to tf32
    "f64": (9, 64),
    "bf16": (10, 16),
    "16u4_align8b": (11, 4),
    "16u4_align16b": (12, 4),
    "16u6_align16b": (13, 6),
}
_NAME_OF_CODE = {code: name for name, (code, _) in DTYPES.items() if name != "tf32"}
_PADDED = ("16u4_align16b", "16u6_align16b")  # 16 elements take 16 bytes of SMEM, with padding
_PADDED_BOX = 128  # the only box[0] that the driver accepts for padded types
_FLOATS = ("f16", "bf16", "f32", "tf32", "f64")  # those that can be filled with NaN

_IM2COL = 1 << 0
_VERSION = 0x2  # w2[3:1], as the driver encodes it
_VERSIONS = (_VERSION, 0)  # 0: built from zeros by tensormap.replace, as Triton does
_NAN_FILL = 1 << 15
_TF32 = 1 << 16
_PROMOTION = 0x3 << 17  # of L2 sectors: none, 64, 128, 256 bytes; no effect on the tile
_PROMOTION_128 = 0x2 << 17  # what the DSL asks for
_LARGE = 1 << 21  # set for tensors of 128 KiB and more; no effect on the tile
_LARGE_BYTES = 128 * 1024
_W2_EXPLAINED = 0x7F | 0xF << 7 | 0x3 << 13 | _NAN_FILL | _TF32 | _PROMOTION | 0x3 << 19 | _LARGE
_TRAVERSAL_BITS = 3

# (w2[14:13] mode, w2[20:19] atomicity: 0 = 16 bytes, 1 = 32 bytes)
_SWIZZLE_CODES: dict[tuple[int, int], Swizzle] = {
    (0, 0): swizzles.NONE,
    (1, 0): swizzles.SWIZZLE_32B,
    (2, 0): swizzles.SWIZZLE_64B,
    (3, 0): swizzles.SWIZZLE_128B,
    (3, 1): swizzles.SWIZZLE_128B_ATOM_32B,
}
_CODES_OF_SWIZZLE = {swizzle: codes for codes, swizzle in _SWIZZLE_CODES.items()}


@dataclass(frozen=True)
class TensorMap:
    """A decoded tensor map.

    address: host address of element 0, bytes.
    dtype: key of DTYPES.
    dims: elements, contiguous dimension first.
    strides: bytes, for dimensions 1 and up.
    box: elements, contiguous dimension first; in im2col mode channels per pixel and pixels per
        column.
    swizzle: of the SMEM image.
    gathers: whether the instruction names each row of the box (tile::gather4, tile::scatter4).
        The 128 bytes do not encode this.
    pixels: bounding box of a map in im2col mode.
    nan_fill: whether elements out of bounds are loaded as NaN instead of zero.
    """

    address: int
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: Swizzle
    gathers: bool = False
    pixels: PixelBox | None = None
    nan_fill: bool = False

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def padded(self) -> bool:
        """Whether every 16 elements, 8 or 12 bytes, are padded to 16 bytes in SMEM."""
        return self.dtype in _PADDED

    @cached_property
    def element_bits(self) -> int:
        return DTYPES[self.dtype][1]

    @cached_property
    def row_bytes(self) -> int:
        """Bytes in global memory of one box row (box[0] elements)."""
        return self.box[0] * self.element_bits // 8

    @cached_property
    def smem_row_bytes(self) -> int:
        """Bytes in SMEM of one box row."""
        return self.box[0] if self.padded else self.row_bytes

    @cached_property
    def rows(self) -> int:
        return prod(self.box[1:])

    @cached_property
    def pitch(self) -> int:
        """Bytes from one box row to the next in SMEM: rows do not share a row of the swizzle
        pattern, however short they are (seen on H100; the manual shows full rows only)."""
        return max(self.smem_row_bytes, self.swizzle.span if self.swizzle.bits else 0)

    @cached_property
    def box_bytes(self) -> int:
        """Bytes of SMEM that the box takes."""
        return self.rows * self.pitch

    @cached_property
    def last(self) -> tuple[int, ...]:
        """Coordinates of the last box inside the tensor."""
        return tuple(size - side for size, side in zip(self.dims, self.box, strict=True))

    @cached_property
    def plain(self) -> bool:
        """Whether a load of a box inside the tensor moves its bytes as they are."""
        return not (self.gathers or self.pixels or self.padded or self.dtype == "tf32")

    @cached_property
    def boxes(self) -> dict[int, Any]:
        """What `machine.tma_tile` knows of loads, by their phase in the swizzle's pattern."""
        return {}


def transaction_bytes(tensor_map: TensorMap) -> int:
    """Bytes that a load of one box counts on its mbarrier: all of the box, in bounds or not.

    Padded types count their packed bytes, not what they occupy in SMEM.
    """
    return tensor_map.rows * tensor_map.row_bytes


def gathering(tensor_map: TensorMap) -> TensorMap:
    """The map as tile::gather4 and tile::scatter4 use it: the box is four rows of the tensor, which
    the instruction names.

    The PTX ISA asks for two dimensions and five coordinates, with the column first. What it says of
    every tile is taken to hold here, too: zeros out of bounds, an mbarrier that counts whole boxes,
    swizzle by the address in shared memory. Nobody here has seen any of it on a GPU. That concerns
    rows out of bounds, negative ones included. It also concerns a box 512 bytes behind the begin of
    a swizzle atom. Public kernels encode maps with a box of one row.

    Raises HardwareRefusal for a map that is not two-dimensional, or whose box has more than the row
    that the instruction takes at each of its four coordinates.
    """
    if tensor_map.rank != 2 or tensor_map.box[1] != 1:
        raise HardwareRefusal(
            f"gather4 or scatter4 with a tensor map of rank {tensor_map.rank} and box"
            f" {tensor_map.box}; needs rank 2 and a box of one row"
        )
    return replace(tensor_map, box=(tensor_map.box[0], GATHERED_ROWS), gathers=True)


def decode(raw: bytes) -> TensorMap:
    """Decode the 128 bytes of a CUtensorMap; the second half is not looked at.

    Raises UnsupportedPtx (naming word and value) for unexplained bits, HardwareRefusal for maps
    that the driver would not have encoded.
    """
    if len(raw) != SIZE:
        raise HardwareRefusal(f"tensor map of {len(raw)} bytes, must be {SIZE}")
    return _decode(raw[: _WORDS.size])  # the rest is often left uninitialised, no key for a cache


@lru_cache(maxsize=4096)
def _decode(data: bytes) -> TensorMap:
    words = _WORDS.unpack(data)
    rank = (words[2] >> 4 & 0x7) + 1
    _require_explained(words, rank)
    high = [words[7] >> 4 * i & 0xF for i in range(MAX_RANK - 1)]
    im2col = bool(words[2] & _IM2COL)
    outer = (words[15],) if im2col else tuple(words[14].to_bytes(4, "little"))[: rank - 1]
    tensor_map = TensorMap(
        address=words[0] | words[1] << 32,
        dtype=_dtype_of(words[2]),
        dims=tuple(size + 1 for size in words[8 : 8 + rank]),
        strides=tuple((words[3 + i] | high[i] << 32) * 16 for i in range(rank - 1)),
        box=tuple(side + 1 for side in (words[13] >> 24, *outer)),
        swizzle=_swizzle_of(words[2]),
        pixels=_pixels_of(words, rank) if im2col else None,
        nan_fill=bool(words[2] & _NAN_FILL),
    )
    _require_legal(tensor_map)
    return tensor_map


def _pixels_of(words: tuple[int, ...], rank: int) -> PixelBox:
    lower, upper, _ = corners(words[14], rank - 2)
    mask = (1 << _TRAVERSAL_BITS) - 1
    strides = (words[13] >> _TRAVERSAL_BITS * dim & mask for dim in range(1, rank - 1))
    return PixelBox(lower, upper, tuple(stride + 1 for stride in strides))


def _require_explained(words: tuple[int, ...], rank: int) -> None:
    """Refuse bits whose meaning is not known, and data in the fields of dimensions beyond rank."""
    w2 = words[2]
    im2col = bool(w2 & _IM2COL)
    versions = _VERSIONS[: 1 if im2col else 2]  # nothing builds maps of im2col mode from zeros
    unexplained = w2 & ~_W2_EXPLAINED or w2 & 0xF & ~_IM2COL not in versions
    if unexplained or rank > MAX_RANK or (im2col and rank < MIN_RANK):
        raise UnsupportedPtx(f"tensor map word 2 has unexplained bits: {w2:#010x}")
    unused = [(8 + dim, words[8 + dim]) for dim in range(rank, MAX_RANK)]
    unused += [(2 + dim, words[2 + dim]) for dim in range(rank, MAX_RANK)]
    unused.append((7, words[7] >> 4 * (rank - 1)))
    if im2col:  # of C and N a traversal stride has no meaning that is known
        known = (1 << _TRAVERSAL_BITS * (rank - 2)) - 1 << _TRAVERSAL_BITS
        unused += [
            (13, words[13] & 0xFFFFFF & ~known),
            (14, corners(words[14], rank - 2)[2]),
            (15, words[15] >> 10),
        ]
    else:
        unused += [
            (13, words[13] & 0xFFFFFF),  # element strides other than 1, and unknown bits
            (14, words[14] >> 8 * (rank - 1)),
            (15, words[15]),
        ]
    for index, value in unused:
        if value:
            raise UnsupportedPtx(f"tensor map word {index} has unexplained bits: {value:#x}")


def _dtype_of(w2: int) -> str:
    code = w2 >> 7 & 0xF
    name = _NAME_OF_CODE.get(code)
    if name is None:
        raise UnsupportedPtx(f"tensor map word 2 has unknown element type {code}: {w2:#010x}")
    if w2 & _TF32:
        if name != "f32":
            raise UnsupportedPtx(f"tensor map word 2 has the tf32 flag on {name}: {w2:#010x}")
        return "tf32"
    return name


def _swizzle_of(w2: int) -> Swizzle:
    codes = (w2 >> 13 & 0x3, w2 >> 19 & 0x3)
    if codes not in _SWIZZLE_CODES:
        mode, atomicity = codes
        raise UnsupportedPtx(
            f"tensor map word 2 has swizzle mode {mode} with atomicity {atomicity}: {w2:#010x}"
        )
    return _SWIZZLE_CODES[codes]


def _require_legal(tm: TensorMap) -> None:
    """The limits of cuTensorMapEncodeTiled and Im2col; also met by tensormap.replace'd maps when
    used."""
    if tm.nan_fill and tm.dtype not in _FLOATS:
        raise HardwareRefusal(
            f"tensor map of {tm.dtype} that fills with NaN; needs one of {_FLOATS}"
        )
    if tm.pixels is not None:
        require_box(tm.pixels, tm.dims[1:-1], tm.box[1])
    alignment = 32 if tm.padded else 16
    if tm.address % alignment:
        raise HardwareRefusal(f"tensor map base {tm.address:#x} not {alignment}-byte aligned")
    for dim, stride in enumerate(tm.strides, start=1):
        if stride % alignment or stride >= MAX_STRIDE:
            raise HardwareRefusal(
                f"tensor map stride of dimension {dim} is {stride} bytes, must be a multiple of"
                f" {alignment} below 2**40"
            )
    if tm.padded and (tm.box[0] != _PADDED_BOX or tm.dims[0] % _PADDED_BOX):
        raise HardwareRefusal(
            f"{tm.dtype.upper()} box[0] is {tm.box[0]} of dimension {tm.dims[0]}, must be"
            f" {_PADDED_BOX} of a multiple of {_PADDED_BOX}"
        )
    if tm.smem_row_bytes % 16 or tm.box[0] * tm.element_bits % 8:
        raise HardwareRefusal(
            f"tensor map box row is {tm.box[0]} x {tm.element_bits} bits, must be a multiple of 16"
            " bytes"
        )
    if tm.swizzle.bits and tm.smem_row_bytes > tm.swizzle.span:
        raise HardwareRefusal(
            f"tensor map box row is {tm.smem_row_bytes} bytes, limit of swizzle {tm.swizzle.name}"
            f" is {tm.swizzle.span}"
        )


def encode(
    address: int,
    dims: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    dtype: str,
    swizzle: str = "128B",
    nan_fill: bool = False,
) -> bytes:
    """Encode a tiled map the way the DSL's host code does: the inverse of `decode`.

    Args:
        address: host address of element 0.
        dims: elements, contiguous dimension first, 1 to 5 dimensions.
        strides: bytes, one fewer than dims (dimension 0 is contiguous).
        box: elements, in the order of dims.
        dtype: key of DTYPES.
        swizzle: key of swizzle.BY_NAME.
        nan_fill: whether elements out of bounds are loaded as NaN instead of zero.

    Raises:
        HardwareRefusal: for what cuTensorMapEncodeTiled rejects.
    """
    rank = len(dims)
    if not 1 <= rank <= MAX_RANK or len(strides) != rank - 1 or len(box) != rank:
        raise HardwareRefusal(
            f"tensor map of {rank} dims, {len(strides)} strides, {len(box)} box sides; needs"
            f" 1 to {MAX_RANK} dims, one stride fewer, as many sides"
        )
    if not all(1 <= side <= MAX_BOX for side in box):
        raise HardwareRefusal(f"tensor map box {box}, limit is {MAX_BOX} per dimension")
    tm = TensorMap(
        address, dtype, tuple(dims), tuple(strides), tuple(box), swizzles.BY_NAME[swizzle],
        nan_fill=nan_fill,
    )  # fmt: skip
    words = _common_words(tm)
    words[14] = int.from_bytes(bytes(side - 1 for side in box[1:]), "little")
    return _WORDS.pack(*words).ljust(SIZE, b"\0")


def encode_im2col(
    address: int,
    dims: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, int],
    pixels: PixelBox,
    dtype: str,
    swizzle: str = "128B",
    nan_fill: bool = False,
) -> bytes:
    """Encode a map in im2col mode, as `encode` does a tiled one.

    Args:
        address: host address of element 0.
        dims: C, W, (H, (D,)) N.
        strides: bytes, for all dimensions but C.
        box: channels per pixel and pixels per column.
        pixels: the bounding box and traversal strides.
        dtype: key of DTYPES.
        swizzle: key of swizzle.BY_NAME.
        nan_fill: whether elements out of bounds are loaded as NaN instead of zero.

    Raises:
        HardwareRefusal: for what cuTensorMapEncodeIm2col rejects.
    """
    rank, spatial = len(dims), len(dims) - 2
    given = (pixels.lower, pixels.upper, pixels.strides)
    if not MIN_RANK <= rank <= MAX_RANK or len(strides) != rank - 1:
        raise HardwareRefusal(
            f"im2col tensor map of {rank} dims and {len(strides)} strides; needs {MIN_RANK} to"
            f" {MAX_RANK} dims, one stride fewer"
        )
    if any(len(each) != spatial for each in given) or not 1 <= box[0] <= MAX_CHANNELS:
        raise HardwareRefusal(
            f"im2col tensor map of {box[0]} channels per pixel with corners and traversal strides"
            f" {given}; needs up to {MAX_CHANNELS} channels and {spatial} of each"
        )
    tm = TensorMap(
        address, dtype, tuple(dims), tuple(strides), tuple(box), swizzles.BY_NAME[swizzle],
        pixels=pixels, nan_fill=nan_fill,
    )  # fmt: skip
    words = _common_words(tm)
    for dim, stride in enumerate(pixels.strides, start=1):
        words[13] |= stride - 1 << _TRAVERSAL_BITS * dim
    words[14], words[15] = pixels.corner_word(), box[1] - 1
    return _WORDS.pack(*words).ljust(SIZE, b"\0")


def _common_words(tm: TensorMap) -> list[int]:
    """Check a map, and return the words that both modes encode alike."""
    if not all(1 <= size <= 1 << 32 for size in tm.dims):
        raise HardwareRefusal(f"tensor map dims {tm.dims}, limit is 2**32")
    _require_legal(tm)
    words = [0] * 16
    words[0:2] = tm.address & 0xFFFFFFFF, tm.address >> 32
    words[2] = _w2_of(tm)
    for i, stride in enumerate(tm.strides):
        words[3 + i] = stride >> 4 & 0xFFFFFFFF
        words[7] |= stride >> 36 << 4 * i
    words[8 : 8 + tm.rank] = [size - 1 for size in tm.dims]
    words[13] = tm.box[0] - 1 << 24
    return words


def _w2_of(tm: TensorMap) -> int:
    mode, atomicity = _CODES_OF_SWIZZLE[tm.swizzle]
    outermost = tm.strides[-1] if tm.strides else tm.element_bits // 8
    return (
        _VERSION
        | (_IM2COL if tm.pixels is not None else 0)
        | tm.rank - 1 << 4
        | DTYPES[tm.dtype][0] << 7
        | mode << 13
        | (_NAN_FILL if tm.nan_fill else 0)
        | (_TF32 if tm.dtype == "tf32" else 0)
        | _PROMOTION_128
        | atomicity << 19
        | (_LARGE if outermost * tm.dims[-1] >= _LARGE_BYTES else 0)
    )


def replace_field(raw: bytearray | np.ndarray, field: str, ordinal: int, value: int) -> None:
    """tensormap.replace.tile.<field>: rewrite one field of the 128 bytes `raw` in place.

    A lower rank clears the fields of the dimensions it removes.

    Args:
        raw: the map.
        field: name of the field in the opcode.
        ordinal: number of the dimension; 0 of global_stride is dimension 1.
        value: address, size in elements, stride in bytes, rank - 1, or a code of the tables in
            PTX ISA, "tensormap.replace".

    Raises:
        UnsupportedPtx: for interleaved layouts, a swizzle of 96 bytes and types that flush
            subnormals.
        HardwareRefusal: for a value that the field cannot hold, and for a map in im2col mode.
    """
    words = np.frombuffer(raw, dtype="<u4")
    if words[2] & _IM2COL:
        raise HardwareRefusal("tensormap.replace.tile on a tensor map of im2col mode")
    if field == "global_address":
        words[0], words[1] = value & 0xFFFFFFFF, value >> 32
    elif field == "global_dim":
        _require_ordinal(field, ordinal, MAX_RANK)
        words[8 + ordinal] = value - 1 & 0xFFFFFFFF
    elif field == "global_stride":
        _require_ordinal(field, ordinal, MAX_RANK - 1)
        if value % 16 or value >= MAX_STRIDE:
            raise HardwareRefusal(
                f"tensormap.replace stride {value}, must be a multiple of 16 below 2**40"
            )
        words[3 + ordinal] = value >> 4 & 0xFFFFFFFF
        keep = int(words[7]) & ~(0xF << 4 * ordinal)
        words[7] = keep | value >> 36 << 4 * ordinal
    elif field == "box_dim":
        _require_ordinal(field, ordinal, MAX_RANK)
        _require_value(field, value, range(1, MAX_BOX + 1))
        _put(words, *((14, 8 * (ordinal - 1)) if ordinal else (13, 24)), 8, value - 1)
    elif field == "element_stride":
        _require_ordinal(field, ordinal, MAX_RANK)
        _require_value(field, value, range(1, (1 << _TRAVERSAL_BITS) + 1))
        _put(words, 13, _TRAVERSAL_BITS * ordinal, _TRAVERSAL_BITS, value - 1)
    elif field == "rank":
        _require_value(field, value, range(MAX_RANK))
        _put(words, 2, 4, 3, value)
        _clear_beyond(words, value + 1)
    else:
        _replace_code(words, field, value)


# tensormap.replace.tile.elemtype: those that the table of types has. s32 and s64 are as u32 and
# u64; 8 and 12 flush subnormals.
_ELEMTYPES = {
    0: "u8", 1: "u16", 2: "u32", 3: "u32", 4: "u64", 5: "u64", 6: "f16", 7: "f32", 9: "f64",
    10: "bf16", 11: "tf32", 13: "16u4_align8b", 14: "16u4_align16b", 15: "16u6_align16b",
}  # fmt: skip
# field: (lowest bit in w2, bits, values that it may have, those that are known here)
_CODES = {
    "swizzle_mode": (13, 2, 5, 4),
    "swizzle_atomicity": (19, 2, 4, 4),
    "fill_mode": (15, 1, 2, 2),
    "interleave_layout": (11, 0, 3, 1),
}


def _replace_code(words: np.ndarray, field: str, value: int) -> None:
    """A field of w2."""
    if field == "elemtype":
        _require_value(field, value, range(16))
        if value not in _ELEMTYPES:
            raise UnsupportedPtx(f"tensormap.replace.tile.elemtype {value}: flushes subnormals")
        name = _ELEMTYPES[value]
        _put(words, 2, 7, 4, DTYPES[name][0])
        _put(words, 2, 16, 1, name == "tf32")
        return
    if field not in _CODES:
        raise UnsupportedPtx(f"tensormap.replace.tile.{field}")
    low, bits, count, known = _CODES[field]
    _require_value(field, value, range(count))
    if value >= known:
        raise UnsupportedPtx(f"tensormap.replace.tile.{field} {value}")
    _put(words, 2, low, bits, value)


def _put(words: np.ndarray, index: int, low: int, bits: int, value: int) -> None:
    mask = (1 << bits) - 1 << low
    words[index] = int(words[index]) & ~mask | value << low & mask


def _clear_beyond(words: np.ndarray, rank: int) -> None:
    """Clear the fields of dimensions that a lower rank removes."""
    for dim in range(rank, MAX_RANK):
        words[8 + dim] = words[2 + dim] = 0
        _put(words, 7, 4 * (dim - 1), 4, 0)
        _put(words, 14, 8 * (dim - 1), 8, 0)
        _put(words, 13, _TRAVERSAL_BITS * dim, _TRAVERSAL_BITS, 0)


def _require_value(field: str, value: int, allowed: range) -> None:
    if value not in allowed:
        raise HardwareRefusal(
            f"tensormap.replace {field} {value}, must be {allowed[0]} to {allowed[-1]}"
        )


def _require_ordinal(field: str, ordinal: int, count: int) -> None:
    if not 0 <= ordinal < count:
        raise HardwareRefusal(f"tensormap.replace {field} ordinal {ordinal}, limit is {count - 1}")
