"""DLPack: the tensor behind an object with `__dlpack__`, read from the capsule by ctypes.

numpy.from_dlpack knows neither bfloat16 nor the eight-bit types. The structures are those of
dlpack.h, versions 0 and 1.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

_PLAIN, _VERSIONED = b"dltensor", b"dltensor_versioned"
_READ_ONLY = 1
_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}  # DLDataTypeCode
_NARROW = {
    8: "float8_e4m3",
    10: "float8_e4m3fn",
    12: "float8_e5m2",
    14: "float8_e8m0fnu",
    17: "float4_e2m1fn",
}


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


@dataclass(frozen=True)
class Exported:
    """A tensor that another library exports.

    strides: elements; None for a contiguous tensor.
    capsule: keeps the memory alive, and frees it with itself.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: str
    itemsize: int
    writable: bool
    capsule: Any = field(repr=False, compare=False)


def tensor_of(value: Any) -> Exported:
    """Return the tensor that `value` exports; raises ValueError for elements of part of a byte."""
    try:
        capsule = value.__dlpack__(max_version=(1, 0))
    except TypeError:  # a library older than DLPack 1.0
        capsule = value.__dlpack__()
    versioned = _named(capsule, _VERSIONED)
    pointer = _pointer(capsule, _VERSIONED if versioned else _PLAIN)
    writable = True
    if versioned:
        managed = _Versioned.from_address(pointer)
        tensor, writable = managed.tensor, not managed.flags & _READ_ONLY
    else:
        tensor = _Tensor.from_address(pointer)
    shape = tuple(tensor.shape[: tensor.ndim]) if tensor.ndim else ()
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.ndim and tensor.strides else None
    address = (tensor.data or 0) + tensor.byte_offset
    bits = tensor.bits * tensor.lanes
    dtype = _name(tensor.code, tensor.bits)
    if bits % 8:
        raise ValueError(
            f"{type(value).__name__} exports elements of {bits} bits ({dtype}); pass the memory as"
            " bytes (uint8)"
        )
    return Exported(address, shape, strides, dtype, bits // 8, writable, capsule)


def _name(code: int, bits: int) -> str:
    if code in _NARROW:
        return _NARROW[code]
    kind = _KINDS.get(code, "dlpack")
    return kind if kind == "bool" else f"{kind}{bits}"


def _named(capsule: Any, name: bytes) -> bool:
    check = ctypes.pythonapi.PyCapsule_IsValid
    check.argtypes, check.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_int
    return bool(check(capsule, name))


def _pointer(capsule: Any, name: bytes) -> int:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.argtypes, get.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p
    return int(get(capsule, name))
