"""Functions of Python from machine code, called without ctypes: a sixth of its time."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

_FASTCALL = 0x80  # METH_FASTCALL, of Python's stable interface
_KEPT: list[Any] = []  # Python only borrows a definition
NAMES = (
    "PyLong_AsLongLong",
    "PyLong_FromLongLong",
    "PyFloat_AsDouble",
    "PyFloat_FromDouble",
    "PyErr_Occurred",
    "PyErr_BadArgument",
)


class _Definition(ctypes.Structure):
    """PyMethodDef"""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("text", ctypes.c_char_p),
    )


def interface() -> dict[str, int]:
    """The addresses of Python's functions that machine code calls."""
    return {
        name: ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value or 0
        for name in NAMES
    }


def builtin(name: str, address: int, owner: object = None) -> Callable[..., Any]:
    """What calls the machine code at an address, of the type
    `PyObject *(PyObject *owner, PyObject *const *arguments, Py_ssize_t count)`."""
    definition = _Definition(name.encode(), address, _FASTCALL, None)
    _KEPT.append(definition)
    make = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)(
        ("PyCFunction_NewEx", ctypes.pythonapi)
    )
    function: Callable[..., Any] = make(ctypes.addressof(definition), owner, None)
    return function
