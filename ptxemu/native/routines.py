"""Types and decorator of routines: loops in restricted Python that become machine code.

A routine is a function of another module of this package. It has the decorator `@routine` and an
annotation for each parameter: `int`, `float`, `f32`, or a pointer such as `p_u8`. It stays a Python
function, which a test calls with numpy arrays (`p_u8(array)`). `library.compiled` returns the
machine code, which is called with addresses.

Integers have 64 bits and a sign. Machine code drops overflow, so a routine calls `wrap(...)` where
overflow may happen. A shift is by 0 to 63 bits and keeps the sign; a divisor is not 0. f32 and f64
are computed as such, operation by operation.

Memory of a pointer parameter must not be accessed through another pointer, unless all of them only
read it. A pointer made from an address (`p_i64(frame[0])`) has no such restriction. Constants of
the module may be numbers, and tables that are only read: `TABLE = p_u16(array)`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias, TypeVar

import numpy as np

f32: TypeAlias = np.float32
_F = TypeVar("_F", bound=Callable[..., Any])
ROUTINES: dict[str, Callable[..., Any]] = {}  # by their symbols in machine code


def routine(function: _F) -> _F:
    """Register a function of this package with the library; the function stays unchanged."""
    ROUTINES[symbol(function)] = function
    return function


def symbol(function: Callable[..., Any]) -> str:
    return f"{function.__module__.rpartition('.')[2]}.{function.__name__}"


class Pointer:
    """Elements in memory, at an address or those of a contiguous array, whose bounds hold then."""

    dtype: ClassVar[type[np.generic]]

    def __init__(self, where: int | np.ndarray) -> None:
        self.array = where if isinstance(where, np.ndarray) else None
        if isinstance(where, np.ndarray):
            if where.dtype != self.dtype or not where.flags.c_contiguous:
                raise ValueError(f"not a contiguous array of {self.dtype.__name__}")
            where = where.ctypes.data
        self._address = int(where)

    def __getitem__(self, index: int) -> Any:
        value = self._element(index)[0]
        return wrap(int(value)) if isinstance(value, np.integer) else value

    def __setitem__(self, index: int, value: Any) -> None:
        element = self._element(index)
        if element.dtype.kind == "f":
            element[0] = value
        else:
            element.view(f"u{element.itemsize}")[0] = int(value) & (1 << 8 * element.itemsize) - 1

    def _element(self, index: int) -> np.ndarray:
        size = self.dtype(0).itemsize
        if self.array is not None and not 0 <= index * size < self.array.nbytes:
            raise IndexError(f"element {index} of an array of {self.array.nbytes} bytes")
        raw = (ctypes.c_uint8 * size).from_address(self._address + index * size)
        return np.ctypeslib.as_array(raw).view(self.dtype)


class p_u8(Pointer):
    dtype = np.uint8


class p_u16(Pointer):
    dtype = np.uint16


class p_u32(Pointer):
    dtype = np.uint32


class p_i32(Pointer):
    dtype = np.int32


class p_u64(Pointer):
    """Pointer to u64; its values are read as signed, as all integers of a routine."""

    dtype = np.uint64


class p_i64(Pointer):
    dtype = np.int64


class p_f64(Pointer):
    dtype = np.float64


def wrap(value: int) -> int:
    """The low 64 bits, with a sign."""
    return (value & (1 << 64) - 1 ^ 1 << 63) - (1 << 63)


def bits_f32(bits: int) -> f32:
    """The f32 with the low 32 bits."""
    return np.uint32(bits & 0xFFFFFFFF).view(np.float32)


def f32_bits(value: f32) -> int:
    return int(np.float32(value).view(np.uint32))
