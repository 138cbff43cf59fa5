"""cuTensorMapEncodeTiled for host code that calls the driver instead of encoding inline."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from ptxemu.errors import UnsupportedPtx
from ptxemu.machine.tensor_map import encode

# CUtensorMapDataType -> names of ptxemu.machine.tensor_map, where signed and unsigned are one type.
_DTYPES = dict(enumerate("u8 u16 u32 u32 u64 u64 f16 f32 f64 bf16".split()))
_DTYPES |= {11: "tf32", 13: "16u4_align8b", 14: "16u4_align16b", 15: "16u6_align16b"}
_SWIZZLES = {0: "none", 1: "32B", 2: "64B", 3: "128B", 4: "128B_ATOM_32B"}  # CUtensorMapSwizzle


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


def encode_tiled(*values: int) -> None:
    """Write the 128 bytes; raises UnsupportedPtx for modes that the emulator does not know.

    L2 promotion has no effect on what a kernel computes. Strides are `rank - 1` uint64, bytes.
    """
    given = TiledArguments(*values)
    dtype, swizzle = _DTYPES.get(given.dtype), _SWIZZLES.get(given.swizzle)
    element_strides = _read(ctypes.c_uint32, given.element_strides, given.rank)
    plain = not given.interleave and not given.out_of_bounds_fill
    if dtype is None or swizzle is None or not plain or set(element_strides) != {1}:
        raise UnsupportedPtx(
            f"cuTensorMapEncodeTiled with element strides {element_strides}, {given}"
        )
    raw = encode(
        given.address,
        _read(ctypes.c_uint64, given.dims, given.rank),
        _read(ctypes.c_uint64, given.strides, given.rank - 1),
        _read(ctypes.c_uint32, given.box, given.rank),
        dtype,
        swizzle,
    )
    ctypes.memmove(given.tensor_map, raw, len(raw))


def _read(kind: Any, address: int, count: int) -> tuple[int, ...]:
    return tuple((kind * count).from_address(address)) if count else ()
