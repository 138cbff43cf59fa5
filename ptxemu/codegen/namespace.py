"""The names that generated block functions may use: numpy types, bit casts, small helpers."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from ptxemu.codegen.values import (
    DTYPE,
    bits_of_double,
    bits_of_float,
    double_of_bits,
    float_of_bits,
)
from ptxemu.numerics import PerLane, approx, arith, formats, integers

_DTYPES = {
    "BOOL": np.bool_,
    "U16": np.uint16,
    "I16": np.int16,
    "U32": np.uint32,
    "I32": np.int32,
    "F32": np.float32,
    "U64": np.uint64,
    "I64": np.int64,
    "F64": np.float64,
}
ZEROS: dict[str, np.ndarray] = {
    name: np.zeros(32, _DTYPES[DTYPE[name]]) for name in ("pred", "u16", "u32", "u64", "f32", "f64")
}
NAN = float_of_bits(0x7FFFFFFF)  # what f32 arithmetic yields, as a Python float
LANES = np.arange(32, dtype=np.uint32)
BITS = (np.uint32(1) << LANES).astype(np.uint32)
for _array in (*ZEROS.values(), LANES, BITS):
    _array.setflags(write=False)


def signed16(x: int) -> int:
    return (x ^ 0x8000) - 0x8000


def signed32(x: int) -> int:
    return (x ^ 0x80000000) - 0x80000000


def signed64(x: int) -> int:
    return (x ^ 0x8000000000000000) - 0x8000000000000000


def join64(low: PerLane, high: PerLane) -> np.ndarray:
    """Low and high words (arrays or ints) -> u64 array."""
    return np.asarray(low, np.uint64) | (np.asarray(high, np.uint64) << np.uint64(32))


def exact(value: PerLane, dtype: type) -> PerLane:
    """np.asarray, but a signalling NaN held as a Python float stays one: a float register may
    hold other data, such as two bf16 values."""
    if isinstance(value, float) and value != value and dtype is np.float32:
        return np.uint32(bits_of_float(value)).view(np.float32)
    return np.asarray(value, dtype)


def one_f32(value: float) -> np.ndarray:
    """Return an array of one element with a Python float; a signalling NaN stays one."""
    if value == value:
        return np.array([value], np.float32)
    return np.array([bits_of_float(value)], np.uint32).view(np.float32)


def item_f32(array: np.ndarray) -> float:
    """The Python float of a one-element array, with the payload of a NaN."""
    value = array[0].item()
    return value if value == value else float_of_bits(int(array.view(np.uint32)[0]))


def full(value: PerLane, dtype: type) -> np.ndarray:
    return np.full(32, exact(value, dtype), dtype)


def choose(mask: PerLane, a: PerLane, b: PerLane, dtype: type) -> np.ndarray:
    """Return `a` in lanes of the mask, else `b`; each may be a scalar."""
    first: np.ndarray = exact(a, dtype)
    return np.where(mask, first, exact(b, dtype))


def stack(values: tuple[Any, ...], dtype: type) -> np.ndarray:
    """Scalars and 32-lane arrays as the rows of one array."""
    out: np.ndarray = np.empty((len(values), 32), dtype)
    for row, value in enumerate(values):
        out[row] = exact(value, dtype)
    return out


def get(file: np.ndarray, offset: int, dtype: type) -> np.ndarray:
    """A register of a warp's file."""
    size = 32 * np.dtype(dtype).itemsize
    return file[offset : offset + size].view(dtype).copy()


def put(
    file: np.ndarray, offset: int, value: PerLane, dtype: type, mask: np.ndarray | None = None
) -> None:
    """Write a value to all lanes of a register, or to those of the mask."""
    register: np.ndarray = file[offset : offset + 32 * np.dtype(dtype).itemsize].view(dtype)
    np.copyto(register, exact(value, dtype), where=True if mask is None else mask)


def mask_bits(mask: np.ndarray) -> int:
    """A 32-lane bool array -> int."""
    return int(np.packbits(mask, bitorder="little").view(np.uint32)[0])


@lru_cache(maxsize=4096)
def bits_mask(bits: int) -> np.ndarray:
    """An int -> 32-lane bool array, which is not to be written."""
    mask: np.ndarray = (BITS & np.uint32(bits)) != 0
    mask.setflags(write=False)
    return mask


def round32(value: float) -> float:
    """A Python float rounded to f32; NaN becomes the canonical one."""
    return float(np.float32(value)) if value == value else NAN


def pack16(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Two 16-bit codes -> u32."""
    return np.asarray(low, np.uint32) | (np.asarray(high, np.uint32) << np.uint32(16))


def clip_int(value: np.ndarray, low: int, high: int) -> np.ndarray:
    """Saturate integers to a range that their own type may not hold."""
    info = np.iinfo(value.dtype)
    return np.clip(value, max(low, info.min), min(high, info.max))


GLOBALS = {
    **_DTYPES,
    "np": np,
    "INF": math.inf,
    "NAN": NAN,
    "bits_f32": float_of_bits,
    "f32_bits": bits_of_float,
    "bits_f64": double_of_bits,
    "f64_bits": bits_of_double,
    "LANES": LANES,
    "BITS": BITS,
    "arith": arith,
    "approx": approx,
    "formats": formats,
    "integers": integers,
    "flush_f32": formats.flush_f32,
    **{
        function.__name__: function
        for function in (
            signed16,
            signed32,
            signed64,
            join64,
            one_f32,
            item_f32,
            full,
            get,
            put,
            choose,
            stack,
            mask_bits,
            round32,
            pack16,
            clip_int,
        )
    },
}
