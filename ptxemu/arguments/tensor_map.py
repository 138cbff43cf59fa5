"""Public tensor maps: an array and a box as the 128 bytes that TMA instructions read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ptxemu.arguments.array import Array, array_of
from ptxemu.errors import HardwareRefusal, UnsupportedPtx
from ptxemu.machine.im2col import PixelBox
from ptxemu.machine.tensor_map import DTYPES, SIZE, TensorMap, decode, encode, encode_im2col
from ptxemu.numerics.swizzle import BY_NAME

_ALIGNMENT = 64
_MAX_ELEMENT_STRIDE = 8
_BY_BYTES = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}
_FLOATS = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64"}
_PACKED = {"float4_e2m1fn_x2": "16u4_align8b"}
_UNPACKED = ("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "int4", "uint4")  # of ml_dtypes


@dataclass(frozen=True)
class EncodedMap:
    """A tensor map as an argument of a launch, by value or, for a pointer, by its address.

    raw: 128 bytes.
    array: the tensor that a kernel may access through it.
    """

    raw: bytes
    array: Array
    block: np.ndarray = field(repr=False, compare=False)  # the same bytes, aligned to 64

    def __bytes__(self) -> bytes:
        return self.raw

    @property
    def decoded(self) -> TensorMap:
        """Return its fields as the emulator reads them, contiguous dimension first."""
        return decode(self.raw)


def tensor_map(
    array: Any,
    box: Sequence[int],
    *,
    swizzle: str | None = None,
    dtype: str | None = None,
    element_strides: Sequence[int] | None = None,
    interleave: str | None = None,
    fill: str = "zero",
    im2col: tuple[Sequence[int], Sequence[int]] | None = None,
) -> EncodedMap:
    """Encode a tensor map as cuTensorMapEncodeTiled or, with `im2col`, cuTensorMapEncodeIm2col.

    Everything is in the order of `array.shape`, contiguous dimension last: the reverse of the
    driver's order.

    Args:
        array: numpy array, torch tensor or another array, of 1 to 5 dimensions. Its address and
            strides have to be multiples of 16 bytes; the last dimension has to be contiguous.
        box: Elements that one instruction copies, at most 256 in each dimension. For tile::gather4
            and tile::scatter4 it has one row: (1, columns). With im2col: (pixels, channels).
        swizzle: "none" (also None), "32B", "64B", "128B" or "128B_ATOM_32B". A row of the box
            must not exceed the swizzle's span.
        dtype: Type of the map; None: that of the array, with FP8 as "u8" and torch's
            float4_e2m1fn_x2 as "16u4_align8b". Others: "tf32" for float32, and "16u4_align8b",
            "16u4_align16b" or "16u6_align16b" for packed bytes. With these three, sides of the box
            count elements, not bytes.
        element_strides: Step between elements in each dimension; None: 1.
        interleave: Only "none" or None.
        fill: What elements out of bounds become: "zero" or, for floats, "nan".
        im2col: Lower and upper corner of the bounding box, one int32 for each spatial dimension
            of an array [N, (D, H,) W, C].

    Raises HardwareRefusal for what the driver refuses, UnsupportedPtx for modes that the emulator
    does not have, TypeError and ValueError for arguments that make no sense.
    """
    found = array_of(array)
    if found is None:
        raise TypeError(f"array is a {type(array).__name__}; a tensor map needs an array")
    name = _dtype(found, dtype)
    dims, strides = _layout(found, name)
    steps = tuple(element_strides or (1,) * len(dims))
    _require_modes(found, steps, interleave, fill)
    common = name, _swizzle(swizzle), fill == "nan"
    sides = tuple(int(side) for side in reversed(tuple(box)))
    if im2col is None:
        if any(step != 1 for step in steps):
            raise UnsupportedPtx(f"a tiled tensor map with element strides {steps}")
        raw = encode(found.address, dims, strides, sides, *common)
    else:
        if len(sides) != 2:
            raise ValueError(f"box={tuple(box)}; with im2col it is (pixels, channels)")
        lower, upper = (tuple(reversed([int(at) for at in corner])) for corner in im2col)
        if steps[0] != 1:
            raise UnsupportedPtx(f"an im2col tensor map with element stride {steps[0]} of N")
        pixels = PixelBox(lower, upper, tuple(reversed(steps[1:-1])))
        raw = encode_im2col(found.address, dims, strides, (sides[0], sides[1]), pixels, *common)
    return EncodedMap(raw, found, _aligned(raw))


def _dtype(array: Array, wanted: str | None) -> str:
    """Return a key of DTYPES; raises ValueError for an array that has no such elements."""
    if array.dtype in _UNPACKED:
        raise ValueError(
            f"an array of {array.dtype} has one element in each byte; pack the elements into an"
            " array of uint8, and name the type with dtype='16u4_align8b' or its like"
        )
    if wanted is None:
        known = _PACKED.get(array.dtype) or _FLOATS.get(array.dtype)
        name = known or _BY_BYTES.get(array.itemsize, "")
        if not name or array.dtype.startswith(("complex", "void", "record", "datetime")):
            raise ValueError(f"an array of {array.dtype} has no type of tensor map; name a dtype")
        return name
    name = wanted.lower()
    if name not in DTYPES:
        raise ValueError(f"dtype={wanted!r}; must be one of {', '.join(DTYPES)}")
    bits = DTYPES[name][1]
    if bits < 8 and array.itemsize != 1:
        raise ValueError(f"dtype={wanted!r} needs packed bytes; the array has {array.dtype}")
    if bits >= 8 and bits != 8 * array.itemsize:
        raise ValueError(
            f"dtype={wanted!r} has {bits // 8} bytes; elements of {array.dtype} have"
            f" {array.itemsize}"
        )
    return name


def _layout(array: Array, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the dims in elements and the strides in bytes, in the driver's order."""
    if not array.shape or 0 in array.shape:
        raise HardwareRefusal(f"a tensor map of an array {array}; every dimension must be >= 1")
    if array.shape[-1] > 1 and array.strides[-1] != array.itemsize:
        raise HardwareRefusal(
            f"the last dimension of {array} has a stride of {array.strides[-1]} bytes; a tensor map"
            f" needs it contiguous ({array.itemsize}): transpose the array, or copy it"
        )
    if any(stride < 0 for stride in array.strides):
        raise HardwareRefusal(f"strides {array.strides} of a tensor map; must be >= 0 bytes")
    *outer, inner = array.shape
    bits = 8 * array.itemsize * inner
    width = DTYPES[name][1]
    if bits % width:
        raise ValueError(f"rows of {bits // 8} bytes are not whole elements of {name}")
    return (bits // width, *reversed(outer)), tuple(reversed(array.strides[:-1]))


def _require_modes(array: Array, steps: tuple[int, ...], interleave: str | None, fill: str) -> None:
    if len(steps) != len(array.shape):
        raise ValueError(f"element_strides={steps}; the array has {len(array.shape)} dimensions")
    if not all(1 <= step <= _MAX_ELEMENT_STRIDE for step in steps):
        raise HardwareRefusal(f"element_strides={steps}; must be 1 to {_MAX_ELEMENT_STRIDE}")
    if interleave not in (None, "none"):
        raise UnsupportedPtx(f"interleave={interleave!r} of a tensor map")
    if fill not in ("zero", "nan"):
        raise ValueError(f"fill={fill!r}; must be 'zero' or 'nan'")


def _swizzle(name: str | None) -> str:
    known = {each.lower(): each for each in BY_NAME}
    found = known.get("none" if name is None else str(name).lower())
    if found is None:
        raise ValueError(f"swizzle={name!r}; must be one of {', '.join(BY_NAME)}")
    return found


def _aligned(raw: bytes) -> np.ndarray:
    space = np.zeros(SIZE + _ALIGNMENT, np.uint8)
    start = -space.ctypes.data % _ALIGNMENT
    block = space[start : start + SIZE]
    block[:] = np.frombuffer(raw, np.uint8)
    return block
