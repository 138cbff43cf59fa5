"""cuTensorMapEncodeTiled and cuTensorMapEncodeIm2col for host code that calls the driver."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from ptxemu.errors import HardwareRefusal, UnsupportedPtx
from ptxemu.machine.im2col import MIN_RANK, PixelBox
from ptxemu.machine.tensor_map import MAX_RANK, encode, encode_im2col

# CUtensorMapDataType -> names of ptxemu.machine.tensor_map, where signed and unsigned are one type.
DTYPES = dict(enumerate("u8 u16 u32 u32 u64 u64 f16 f32 f64 bf16".split()))
DTYPES |= {11: "tf32", 13: "16u4_align8b", 14: "16u4_align16b", 15: "16u6_align16b"}
SWIZZLES = {0: "none", 1: "32B", 2: "64B", 3: "128B", 4: "128B_ATOM_32B"}  # CUtensorMapSwizzle


class TiledArguments(NamedTuple):
    """The arguments of cuTensorMapEncodeTiled in its order: addresses, int32 and enum values."""

    tensor_map: int
    dtype: int
    rank: int
    address: int
    dims: int
    strides: int
    box: int
    element_strides: int
    interleave: int
    swizzle: int
    l2_promotion: int
    out_of_bounds_fill: int


class Im2colArguments(NamedTuple):
    """The arguments of cuTensorMapEncodeIm2col in its order: addresses, int32 and enum values."""

    tensor_map: int
    dtype: int
    rank: int
    address: int
    dims: int
    strides: int
    lower: int
    upper: int
    channels: int
    pixels: int
    element_strides: int
    interleave: int
    swizzle: int
    l2_promotion: int
    out_of_bounds_fill: int


def encode_tiled(*values: int) -> None:
    """Write the 128 bytes; raises UnsupportedPtx for modes that the emulator does not know.

    L2 promotion has no effect on what a kernel computes. Strides are `rank - 1` uint64, bytes.
    """
    given = TiledArguments(*values)
    element_strides = _read(ctypes.c_uint32, given.element_strides, given.rank)
    if set(element_strides) != {1}:
        raise UnsupportedPtx(
            f"cuTensorMapEncodeTiled with element strides {element_strides}, {given}"
        )
    raw = encode(
        given.address,
        _read(ctypes.c_uint64, given.dims, given.rank),
        _read(ctypes.c_uint64, given.strides, given.rank - 1),
        _read(ctypes.c_uint32, given.box, given.rank),
        *_common(given, "cuTensorMapEncodeTiled"),
    )
    ctypes.memmove(given.tensor_map, raw, len(raw))


def encode_pixels(*values: int) -> None:
    """Encode as cuTensorMapEncodeIm2col. Corners have `rank - 2` int32, W first.

    The driver's manual documents that the element stride of C is unused without interleaving.
    """
    given = Im2colArguments(*values)
    if not MIN_RANK <= given.rank <= MAX_RANK:
        raise HardwareRefusal(
            f"cuTensorMapEncodeIm2col of {given.rank} dimensions; must be {MIN_RANK} to {MAX_RANK}"
        )
    _, *inner, images = _read(ctypes.c_uint32, given.element_strides, given.rank)
    if images != 1:
        raise UnsupportedPtx(f"cuTensorMapEncodeIm2col with element stride {images} of N, {given}")
    lower, upper = (_read(ctypes.c_int32, at, given.rank - 2) for at in (given.lower, given.upper))
    raw = encode_im2col(
        given.address,
        _read(ctypes.c_uint64, given.dims, given.rank),
        _read(ctypes.c_uint64, given.strides, given.rank - 1),
        (given.channels, given.pixels),
        PixelBox(lower, upper, tuple(inner)),
        *_common(given, "cuTensorMapEncodeIm2col"),
    )
    ctypes.memmove(given.tensor_map, raw, len(raw))


def _common(given: TiledArguments | Im2colArguments, name: str) -> tuple[str, str, bool]:
    """Type, swizzle, and whether NaN is filled in."""
    dtype, swizzle = DTYPES.get(given.dtype), SWIZZLES.get(given.swizzle)
    if dtype is None or swizzle is None or given.interleave or given.out_of_bounds_fill > 1:
        raise UnsupportedPtx(f"{name} with {given}")
    return dtype, swizzle, bool(given.out_of_bounds_fill)


def _read(kind: Any, address: int, count: int) -> tuple[int, ...]:
    return tuple((kind * count).from_address(address)) if count else ()
