"""Data movement of one TMA tensor operation: a box between global memory and its SMEM image.

Two independent halves, so that the caller decides when each happens: `load_tile` / `store_tile` /
`reduce_tile` work between global memory and the dense image (dimension 0 fastest, unswizzled), and
`place_tile` / `gather_tile` between the dense image and swizzled shared memory.
`memory` is any object with read_rows(addresses int64 (n,), nbytes) -> uint8 (n, nbytes) and
write_rows(addresses, data uint8 (n, nbytes)), both bounds-checked.
A position is the coordinates of the box, followed by the rows that a gather names, or by the
offsets of im2col mode.
Source: PTX ISA, cp.async.bulk.tensor and cp.reduce.async.bulk.tensor; tiled and im2col mode.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from ptxemu.errors import HardwareRefusal, UnsupportedPtx
from ptxemu.machine.im2col import PixelBox, pixels
from ptxemu.machine.memory import GlobalMemory, as_addresses
from ptxemu.machine.tensor_map import TensorMap
from ptxemu.native import operands as native
from ptxemu.native.library import compiled
from ptxemu.numerics import arith, formats
from ptxemu.numerics.swizzle import Swizzle

SMEM_ALIGNMENT = 128  # of the SMEM address of a tiled TMA operation, bytes
_WORD = 8  # bytes moved per index: divides every swizzle atom
# The manual's OOB-NaN, two bytes of it, in elements of any size. By another emulator of PTX (among
# the public repositories), which says that it was seen on GPUs; the manual does not name the bits.
_OOB_NAN = 0x7FF7
_HALF = 1 << 63  # of the addresses; those of the upper half are negative, and nothing lies there


class RowMemory(Protocol):
    def read_rows(self, addresses: np.ndarray, nbytes: int) -> np.ndarray: ...

    def write_rows(self, addresses: np.ndarray, data: np.ndarray) -> None: ...


class _Clip(NamedTuple):
    """The in-bounds part of a box: global addresses of its rows, and its place in the image."""

    addresses: np.ndarray  # int64, of the first in-bounds byte of each row
    rows: np.ndarray | slice  # which image rows; a slice is all of them
    columns: slice  # which bytes of an image row (packed bytes for padded types)


def load_tile(tm: TensorMap, coords: tuple[int, ...], memory: RowMemory) -> np.ndarray:
    """Read the box at element coordinates `coords` (dimension 0 first, may be negative).

    Returns the dense image, uint8 (tm.box_bytes,); elements out of bounds are zero, or the map's
    NaN. tf32 maps round to nearest even at 10 mantissa bits (measured on sm_120, Triton pull
    request 11751).
    """
    clip = _clip(tm, coords)
    width = clip.columns.stop - clip.columns.start
    if isinstance(clip.rows, slice) and width == tm.row_bytes:
        image = _loaded(tm, memory.read_rows(clip.addresses, width))
    else:
        image = _background(tm)
        if width > 0 and len(clip.addresses):
            image[clip.rows, clip.columns] = _loaded(tm, memory.read_rows(clip.addresses, width))
    return (_pad(image, 2 * tm.element_bits) if tm.padded else image).reshape(-1)


class DirectLoad(NamedTuple):
    """A load of a box that lies inside the tensor, which machine code executes.

    rows: addresses of the box's rows, int64, and the bytes of each, as `box_rows` returns them.
    """

    box: _Box
    origin: int
    row_bytes: int

    @property
    def rows(self) -> tuple[np.ndarray, int]:
        return self.box.arrays[1] + self.origin, self.row_bytes

    def run(self, smem_at: int, offset: int) -> None:
        """Do what `load_tile` and `place_tile` do.

        Args:
            smem_at: address of the shared memory of a CTA.
            offset: the offset there that `direct_load` was asked about.
        """
        routine, frame = compiled(native.load_box), self.box.frame
        assert routine is not None, "there is a direct load"
        frame[native.ROWS_AT] = self.origin
        frame[native.SHARED] = smem_at + offset - self.box.phase
        routine(self.box.address)


def direct_load(
    tm: TensorMap, coords: tuple[int, ...], memory: GlobalMemory, size: int, offset: int
) -> DirectLoad | None:
    """Return how machine code loads a box, or None if the box is not a plain one inside the tensor.

    Args:
        tm: the tensor map.
        coords: of the box.
        memory: global memory.
        size: bytes of the shared memory that the box goes to.
        offset: its place there.
    """
    if compiled(native.load_box) is None or not tm.plain or tm.row_bytes % _WORD:
        return None
    if len(coords) != len(tm.last):
        return None
    for coordinate, last in zip(coords, tm.last, strict=True):
        if not 0 <= coordinate <= last:
            return None
    origin = tm.address + coords[0] * tm.element_bits // 8
    for coordinate, stride in zip(coords[1:], tm.strides, strict=True):
        origin += coordinate * stride
    phase = offset % tm.swizzle.period
    box = tm.boxes.get(phase)
    if box is None:
        box = tm.boxes[phase] = _box(tm, phase)
    if offset - phase + box.end > size or origin % _WORD:
        return None
    if not memory.read_together(origin, box.arrays[1], tm.row_bytes, box.extent):
        return None
    return DirectLoad(box, origin, tm.row_bytes)


class _Box(NamedTuple):
    """What is equal in all loads of a box to places that are equal in the swizzle's pattern.

    phase: bytes from the start of the pattern to the box.
    frame: words of `native.load_box`, and their address.
    extent: bytes from the first one of the first row to the end of the last row.
    end: bytes of shared memory from the start of the pattern.
    arrays: what the frame has addresses of.
    """

    phase: int
    frame: memoryview
    address: int
    extent: int
    end: int
    arrays: tuple[np.ndarray, ...]


def _box(tm: TensorMap, phase: int) -> _Box:
    return _box_of(tm.strides, tm.box, tm.swizzle, phase, (tm.rows, tm.row_bytes, tm.pitch))


@lru_cache(maxsize=1024)
def _box_of(
    strides: tuple[int, ...],
    sides: tuple[int, ...],
    swizzle: Swizzle,
    phase: int,
    shape: tuple[int, int, int],
) -> _Box:
    offsets = _row_offsets(strides, sides)
    rows, row_bytes, _ = shape
    if swizzle.bits:
        places = _permutation(swizzle, phase, shape)
    else:
        places = phase // _WORD + np.arange(rows * row_bytes // _WORD, dtype=np.intp)
    frame = np.zeros(native.BOX, np.int64)
    frame[native.OFFSETS], frame[native.PLACE_OF] = offsets.ctypes.data, places.ctypes.data
    frame[native.BOX_ROWS], frame[native.BOX_WORDS] = rows, row_bytes // _WORD
    extent, end = int(offsets.max()) + row_bytes, (int(places.max()) + 1) * _WORD
    return _Box(phase, frame.data, frame.ctypes.data, extent, end, (frame, offsets, places))


def _background(tm: TensorMap) -> np.ndarray:
    """The image of a box that lies out of bounds, uint8 (rows, bytes)."""
    if tm.nan_fill:
        return np.full((tm.rows, tm.row_bytes // 2), _OOB_NAN, "<u2").view(np.uint8)
    return np.zeros((tm.rows, tm.row_bytes), np.uint8)


def _loaded(tm: TensorMap, rows: np.ndarray) -> np.ndarray:
    """Rows of global memory in the form of the image."""
    return _round_to_tf32(np.ascontiguousarray(rows)) if tm.dtype == "tf32" else rows


def store_tile(
    tm: TensorMap, coords: tuple[int, ...], image: np.ndarray, memory: RowMemory
) -> None:
    """Write the in-bounds elements of the dense image, uint8 (tm.box_bytes,), to the box."""
    clip, data = _clip_image(tm, coords, image)
    if data.size:
        memory.write_rows(clip.addresses, data)


# Signed and unsigned integers share a type code in the map, so its min and max are not known.
_TENSOR_REDUCTIONS = {
    "f32": {"add"},
    "f16": {"add", "min", "max"},
    "bf16": {"add", "min", "max"},
    "u32": {"add", "min", "max", "inc", "dec", "and", "or", "xor"},
    "u64": {"add", "min", "max", "and", "or", "xor"},
}


def box_rows(tm: TensorMap, coords: tuple[int, ...]) -> tuple[np.ndarray, int]:
    """Return (addresses, bytes of each) of the in-bounds part of the box: what an operation
    touches."""
    clip = _clip(tm, coords)
    return clip.addresses, clip.columns.stop - clip.columns.start


def reduce_tile(
    tm: TensorMap, coords: tuple[int, ...], image: np.ndarray, memory: RowMemory, op: str
) -> None:
    """cp.reduce.async.bulk.tensor: combine the in-bounds elements of the image into the box."""
    if op not in _TENSOR_REDUCTIONS.get(tm.dtype, ()):
        raise UnsupportedPtx(f"cp.reduce.async.bulk.tensor .{op} on a tensor map of {tm.dtype}")
    clip, data = _clip_image(tm, coords, image)
    if data.size:
        old = memory.read_rows(clip.addresses, data.shape[1])
        memory.write_rows(clip.addresses, combine(op, tm.dtype, old, data))


def place_tile(tm: TensorMap, image: np.ndarray, smem: np.ndarray, offset: int) -> None:
    """Write the dense image into `smem` (uint8, whole CTA) at byte `offset`, swizzled."""
    if not tm.swizzle.bits:
        smem[_span(tm, smem, offset)] = image
        return
    index = _swizzled_words(tm, smem, offset)
    smem.view(np.uint64)[index] = np.ascontiguousarray(image).view(np.uint64)


def gather_tile(tm: TensorMap, smem: np.ndarray, offset: int) -> np.ndarray:
    """Read the dense image, uint8 (rows * smem_row_bytes,), back: the inverse of place_tile."""
    if not tm.swizzle.bits:
        return smem[_span(tm, smem, offset)].copy()
    return smem.view(np.uint64)[_swizzled_words(tm, smem, offset)].view(np.uint8)


def combine(op: str, dtype: str, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Element-wise reduction of cp.reduce.async.bulk(.tensor) on byte arrays of equal shape.

    dtype: u32, s32, u64, s64, f32, f64, f16 or bf16. Floating-point results round to nearest even.
    Raises UnsupportedPtx for a pair that the instruction does not have.
    """
    function = _OPERATIONS.get(op)
    old, new = np.ascontiguousarray(old), np.ascontiguousarray(new)
    if function is not None and dtype in _INTEGERS:
        kind = _INTEGERS[dtype]
        return function(old.view(kind), new.view(kind)).view(np.uint8)
    if dtype in _FLOATS and op in _FLOATS[dtype]:
        return _FLOATS[dtype][op](old, new).view(np.uint8)
    raise UnsupportedPtx(f"cp.reduce.async.bulk .{op}.{dtype}")


def _viewed(kind: type, function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda old, new: np.asarray(function(old.view(kind), new.view(kind)), kind)


_OPERATIONS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "inc": lambda old, limit: np.where(old >= limit, old * 0, old + 1),
    "dec": lambda old, limit: np.where((old == 0) | (old > limit), limit, old - 1),
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
_INTEGERS = {"u32": np.uint32, "s32": np.int32, "u64": np.uint64, "s64": np.int64}
_FLOATS = {
    "f32": {"add": _viewed(np.float32, arith.add_f32)},
    "f64": {"add": _viewed(np.float64, arith.add_f64_in_memory)},
    **{
        kind: {
            op: _viewed(np.uint16, getattr(arith, f"{op}_{kind}")) for op in ("add", "min", "max")
        }
        for kind in ("f16", "bf16")
    },
}


def _clip(tm: TensorMap, coords: tuple[int, ...]) -> _Clip:
    """Intersect the box at `coords` with the tensor."""
    _require_coords(tm, coords)
    if tm.gathers:
        return _named_rows(tm, coords)
    if tm.pixels is not None:
        return _named_pixels(tm, tm.pixels, coords)
    origin = tm.address + coords[0] * tm.element_bits // 8
    origin += sum(c * stride for c, stride in zip(coords[1:], tm.strides, strict=True))
    columns = _columns(tm, coords[0])
    origin = (origin + columns.start + _HALF) % (2 * _HALF) - _HALF
    addresses = _row_offsets(tm.strides, tm.box) + origin  # modulo 2^64
    outer = list(zip(coords[1:], tm.box[1:], tm.dims[1:], strict=True))
    rows: np.ndarray | slice = slice(None)
    if any(c < 0 or c + side > size for c, side, size in outer):
        rows = np.flatnonzero(_rows_in_bounds(outer))
        addresses = addresses[rows]
    return _Clip(addresses, rows, columns)


def _named_rows(tm: TensorMap, coords: tuple[int, ...]) -> _Clip:
    """The rows of a tile::gather4 that are in the tensor; coords: the column and four rows."""
    origin = tm.address + coords[0] * tm.element_bits // 8
    rows = np.flatnonzero([0 <= row < tm.dims[1] for row in coords[1:]])
    addresses = as_addresses([origin + coords[1 + row] * tm.strides[0] for row in rows])
    columns = _columns(tm, coords[0])
    every = slice(None) if len(rows) == tm.rows else rows
    return _Clip(addresses + columns.start, every, columns)


def _named_pixels(tm: TensorMap, box: PixelBox, coords: tuple[int, ...]) -> _Clip:
    """The pixels of an im2col operation that are in the tensor; coords: C, W, (H, (D,)) N, and an
    offset for each of those in the middle."""
    start, offsets = coords[1 : tm.rank], coords[tm.rank :]
    where = pixels(box, tm.dims[1:-1], start, tm.rows)
    inside = np.ones(tm.rows, bool)
    addresses = np.full(tm.rows, as_addresses([tm.address + coords[0] * tm.element_bits // 8])[0])
    for at, offset, size, stride in zip(where, (*offsets, 0), tm.dims[1:], tm.strides, strict=True):
        at = at + offset
        inside &= (at >= 0) & (at < size)
        addresses += at * stride
    columns = _columns(tm, coords[0])
    rows = np.flatnonzero(inside)
    every = slice(None) if len(rows) == tm.rows else rows
    return _Clip(addresses[rows] + columns.start, every, columns)


def _columns(tm: TensorMap, start: int) -> slice:
    """Bytes of a row of the image that lie in the tensor."""
    first = max(0, -start)
    last = max(first, min(tm.box[0], tm.dims[0] - start))
    return slice(first * tm.element_bits // 8, last * tm.element_bits // 8)


def _clip_image(
    tm: TensorMap, coords: tuple[int, ...], image: np.ndarray
) -> tuple[_Clip, np.ndarray]:
    """The in-bounds part of the box at `coords` and the image bytes that belong to it."""
    if tm.padded:
        raise UnsupportedPtx(f"TMA store of the padded type {tm.dtype.upper()}")
    clip = _clip(tm, coords)
    return clip, image.reshape(tm.rows, tm.row_bytes)[clip.rows, clip.columns]


def inside(tm: TensorMap, coords: tuple[int, ...], image: np.ndarray) -> np.ndarray:
    """The bytes of the dense image that lie in the tensor, which are those that a store writes."""
    return _clip_image(tm, coords, image)[1]


def _rows_in_bounds(outer: list[tuple[int, int, int]]) -> np.ndarray:
    """Bool (rows,), dimension 1 fastest, from (coordinate, box side, size) per outer dimension."""
    inside = np.ones(1, bool)
    for coordinate, side, size in outer:
        position = coordinate + np.arange(side)
        valid = (position >= 0) & (position < size)
        inside = (valid[:, None] & inside[None, :]).reshape(-1)
    return inside


@lru_cache(maxsize=1024)
def _row_offsets(strides: tuple[int, ...], box: tuple[int, ...]) -> np.ndarray:
    """Byte offset of each box row from the box's first one, int64, dimension 1 fastest."""
    offsets = np.zeros(1, np.int64)
    for stride, side in zip(strides, box[1:], strict=True):
        offsets = (np.arange(side, dtype=np.int64)[:, None] * stride + offsets).reshape(-1)
    offsets.flags.writeable = False
    return offsets


def _require_coords(tm: TensorMap, coords: tuple[int, ...]) -> None:
    wanted = tm.rank if tm.pixels is None else 2 * tm.rank - 2
    if len(coords) != (1 + tm.rows if tm.gathers else wanted):
        raise HardwareRefusal(f"{len(coords)}-d TMA instruction on a {tm.rank}-d tensor map")
    granule = 128 if tm.padded else max(1, 8 // tm.element_bits)
    if coords[0] % granule:
        raise HardwareRefusal(
            f"TMA coordinate 0 is {coords[0]}, must be a multiple of {granule} for {tm.dtype}"
        )


def _span(tm: TensorMap, smem: np.ndarray, offset: int) -> slice:
    """The SMEM bytes of a tile at `offset`, checked."""
    if offset % SMEM_ALIGNMENT:
        raise HardwareRefusal(f"TMA SMEM address {offset:#x} not {SMEM_ALIGNMENT}-byte aligned")
    end = offset + tm.box_bytes
    if offset < 0 or end > len(smem):
        raise HardwareRefusal(f"TMA tile ends at SMEM offset {end:#x}, limit is {len(smem):#x}")
    return slice(offset, end)


def _swizzled_words(tm: TensorMap, smem: np.ndarray, offset: int) -> np.ndarray:
    """Return the index of each 8-byte word of the image in `smem` viewed as uint64."""
    _span(tm, smem, offset)
    phase = offset % tm.swizzle.period
    shape = (tm.rows, tm.smem_row_bytes, tm.pitch)
    index = _permutation(tm.swizzle, phase, shape) + (offset - phase) // _WORD
    if tm.box_bytes % tm.swizzle.period and index.max() >= len(smem) // _WORD:
        raise HardwareRefusal(f"swizzled TMA tile at {offset:#x} leaves SMEM of {len(smem):#x}")
    return index


@lru_cache(maxsize=1024)
def _permutation(swizzle: Swizzle, phase: int, shape: tuple[int, int, int]) -> np.ndarray:
    """Word index of each image word, relative to the pattern start `phase` bytes before it.

    shape: rows, bytes of a row, bytes from one row to the next.
    """
    rows, nbytes, pitch = shape
    starts = phase + pitch * np.arange(rows, dtype=np.intp)[:, None]
    logical = starts + np.arange(0, nbytes, _WORD, dtype=np.intp)
    return swizzle.apply(logical.reshape(-1)) // _WORD


def _pad(image: np.ndarray, nbytes: int) -> np.ndarray:
    """Pad every so many bytes with zeros to 16 bytes."""
    chunks = np.zeros((image.size // nbytes, 16), np.uint8)
    chunks[:, :nbytes] = image.reshape(-1, nbytes)
    return chunks


def _round_to_tf32(image: np.ndarray) -> np.ndarray:
    """Round f32 bytes to nearest even at 10 mantissa bits; NaN as of cvt.rn.tf32 (H100)."""
    return formats.f32_to_tf32(image.view(np.float32), "rn").view(np.uint8)
