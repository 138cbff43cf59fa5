"""CuPy's runtime functions replaced, in a table of C functions as Cython writes it.

`published` runs CuPy itself.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from ptxemu.host import gpus
from ptxemu.host.cupy_runtime import Runtime, _replace
from ptxemu.host.gpus import GPUS
from ptxemu.host.libcuda import Driver

LAST = "int __pyx_skip_dispatch"
api = ctypes.pythonapi


def capsule(signature: bytes) -> object:
    """An entry of the table; the function is never called."""
    api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    api.PyCapsule_New.restype = ctypes.py_object
    return api.PyCapsule_New(1, signature, None)


def function_of(table, name, signature, kind):
    """Return the C function of an entry, as a compiled module takes it."""
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    return kind(api.PyCapsule_GetPointer(table[name], signature))


@pytest.fixture
def runtime():
    with gpus.seeming(GPUS["h100"]):
        yield Runtime(Driver(lambda request: None))


def test_c_functions_are_replaced(runtime):
    signatures = {
        "malloc": f"intptr_t (size_t, {LAST})".encode(),
        "memcpy": f"PyObject *(intptr_t, intptr_t, size_t, int, {LAST})".encode(),
        "streamWaitEvent": f"PyObject *(intptr_t, intptr_t, {LAST}, struct more *more)".encode(),
        "_ensure_context": b"PyObject *(void)",
        "eventElapsedTime": f"float (intptr_t, intptr_t, {LAST})".encode(),
    }
    table = {name: capsule(signature) for name, signature in signatures.items()}
    for name in signatures:
        _replace(table, name, getattr(runtime, name))
    number, size, text = ctypes.c_ssize_t, ctypes.c_size_t, ctypes.py_object

    def entry(name, *kinds):
        return function_of(table, name, signatures[name], ctypes.PYFUNCTYPE(*kinds))

    pointer = entry("malloc", number, size, ctypes.c_int)(100, 0)
    assert pointer % 512 == 0
    data = np.arange(25, dtype=np.uint32)
    copy = entry("memcpy", text, number, number, size, ctypes.c_int, ctypes.c_int)
    assert copy(pointer, data.ctypes.data, 100, 1, 0) is None
    assert ctypes.string_at(pointer, 100) == data.tobytes()
    wait = entry("streamWaitEvent", text, number, number, ctypes.c_int, ctypes.c_void_p)
    assert wait(1, 2, 0, None) is None
    assert entry("_ensure_context", text)() is None
    elapsed = entry("eventElapsedTime", ctypes.c_float, number, number, ctypes.c_int)
    assert elapsed(1, 2, 0) == pytest.approx(runtime.eventElapsedTime(1, 2))


def test_memory_knows_where_it_lies(runtime):
    pointer = runtime.malloc(64)
    assert [runtime.pointerGetMemoryType(at) for at in (pointer + 63, pointer + 64)] == [2, 0]
    runtime.free(pointer)
    assert runtime.pointerGetMemoryType(pointer) == 0


def test_the_device_is_the_pretended_one(runtime):
    gpu, properties = GPUS["h100"], runtime.getDeviceProperties(0)
    assert (properties["major"], properties["name"]) == (9, gpu.name.encode())
    assert properties["multiProcessorCount"] == runtime.deviceGetAttribute(16, 0) == gpu.sms
