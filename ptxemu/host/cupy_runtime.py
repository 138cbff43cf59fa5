"""CuPy without the CUDA runtime: its module of runtime functions, replaced by the emulated driver.

CuPy's wheels have the runtime library linked in, which asks the driver for tables that are not
documented. So its functions are replaced where CuPy's compiled modules take them from: the table of
C functions that Cython keeps in `__pyx_capi__`, and the module's attributes. CuPy compiles to PTX,
and its kernels are launched by the driver.

Libraries such as cuBLAS, and CuPy's modules that have a runtime of their own (CUB, Thrust, cuFFT),
do not run. Replaced functions cannot raise: an error of ours is printed.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

from ptxemu.host import gpus
from ptxemu.host.cuda_stubs import VERSION, nominal_time
from ptxemu.host.libcuda import Driver
from ptxemu.host.patching import environment, patched

# CuPy's copy of CUB, which it takes for sums otherwise, would fail in silence.
_SETTINGS = {"CUPY_COMPILE_WITH_PTX": "1", "CUPY_ACCELERATORS": ""}
_NAME = "cupy_backends.cuda.api.runtime"
_SIGNATURE = re.compile(r"(.*?) ?\((.*)\)")
_C_TYPES: dict[str, Any] = {
    "void": None, "int": ctypes.c_int, "unsigned int": ctypes.c_uint, "float": ctypes.c_float,
    "size_t": ctypes.c_size_t, "intptr_t": ctypes.c_ssize_t, "uintmax_t": ctypes.c_size_t,
    "PyObject *": ctypes.py_object,
}  # fmt: skip
_LAST = "int __pyx_skip_dispatch"  # what follows are pointers to arguments that were left out
_UNREGISTERED, _DEVICE = 0, 2  # cudaMemoryType

_callbacks: list[Any] = []  # compiled modules keep their addresses for good


@contextmanager
def cupy_without_runtime(driver: Driver) -> Iterator[None]:
    """Replace the functions. CuPy is imported within the block; it cannot be used after it."""
    with ExitStack() as stack:
        stack.enter_context(environment(_SETTINGS))
        runtime: Any = import_module(_NAME)
        functions = _functions(Runtime(driver))
        for name, function in functions.items():
            if name in runtime.__pyx_capi__:
                _replace(runtime.__pyx_capi__, name, function)
        stack.enter_context(patched(runtime, functions))
        yield


def _functions(runtime: Runtime) -> dict[str, Callable[..., Any]]:
    names = [name for name in vars(Runtime) if name[0] != "_"] + ["_ensure_context"]
    return {name: getattr(runtime, name) for name in names}


def _replace(table: dict[str, Any], name: str, function: Callable[..., Any]) -> None:
    """Put a C function that calls `function` in the place of `name`, with the same signature."""
    api = ctypes.pythonapi
    api.PyCapsule_GetName.argtypes = [ctypes.py_object]
    api.PyCapsule_GetName.restype = ctypes.c_char_p
    api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    api.PyCapsule_New.restype = ctypes.py_object
    signature = api.PyCapsule_GetName(table[name])
    made = _SIGNATURE.fullmatch(signature.decode())
    assert made is not None, signature
    words = [word for word in made[2].split(", ") if word != "void"]
    count = words.index(_LAST) if _LAST in words else len(words)
    kinds = [_C_TYPES.get(word.replace(_LAST, "int"), ctypes.c_void_p) for word in words]
    result = _C_TYPES.get(made[1], ctypes.py_object)
    callback = ctypes.PYFUNCTYPE(result, *kinds)(lambda *values: function(*values[:count]))
    own = ctypes.create_string_buffer(signature)  # a capsule refers to its name
    _callbacks.extend((callback, own))
    address = ctypes.cast(callback, ctypes.c_void_p)
    table[name] = api.PyCapsule_New(address, ctypes.cast(own, ctypes.c_char_p), None)


class Runtime:
    """The functions, by name, as far as one GPU, its memory, streams and events need them."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def _of_driver(self, name: str, *arguments: int) -> int:
        """Call a function of the driver that writes its result to the first argument."""
        result = ctypes.c_uint64()
        getattr(self._driver, name)(ctypes.addressof(result), *arguments)
        return result.value

    # -- the device

    def _ensure_context(self) -> None: ...

    def driverGetVersion(self) -> int:
        return VERSION

    runtimeGetVersion = driverGetVersion

    def _getCUDAMajorVersion(self) -> int:
        return VERSION // 1000

    def getDevice(self) -> int:
        return 0

    def getDeviceCount(self) -> int:
        return 1

    def setDevice(self, device: int) -> None: ...

    def deviceSynchronize(self) -> None: ...

    def deviceGetAttribute(self, attribute: int, device: int) -> int:
        return gpus.current().attribute(attribute) or 0

    def deviceCanAccessPeer(self, device: int, peer: int) -> int:
        return 0

    def deviceGetPCIBusId(self, device: int) -> str:
        return "0000:00:00.0"

    def deviceGetLimit(self, limit: int) -> int:
        return 0

    def getDeviceProperties(self, device: int) -> dict[str, Any]:
        """Return those that programs ask for; names are CUDA's (cudaDeviceProp)."""
        gpu = gpus.current()
        numbers = {"maxThreadsPerBlock": 1, "sharedMemPerBlock": 8, "warpSize": 10,
                   "regsPerBlock": 12, "multiProcessorCount": 16, "l2CacheSize": 38,
                   "maxThreadsPerMultiProcessor": 39, "sharedMemPerMultiprocessor": 81,
                   "sharedMemPerBlockOptin": 97}  # fmt: skip
        major, minor = gpu.capability
        return {
            "name": gpu.name.encode(),
            "totalGlobalMem": gpu.memory_bytes,
            "major": major,
            "minor": minor,
            **{name: gpu.attribute(number) or 0 for name, number in numbers.items()},
        }

    # -- memory

    def memGetInfo(self) -> tuple[int, int]:
        return (gpus.current().memory_bytes,) * 2

    def malloc(self, size: int) -> int:
        return self._of_driver("MemAlloc", size)

    def free(self, pointer: int) -> None:
        self._driver.MemFree(pointer)

    def mallocAsync(self, size: int, stream: int) -> int:
        return self.malloc(size)

    hostAlloc = mallocAsync

    def freeAsync(self, pointer: int, stream: int) -> None:
        self._driver.MemFree(pointer)

    freeHost = free

    def memcpy(self, target: int, source: int, size: int, kind: int) -> None:
        ctypes.memmove(target, source, size)

    def memcpyAsync(self, target: int, source: int, size: int, kind: int, stream: int) -> None:
        ctypes.memmove(target, source, size)

    def memset(self, pointer: int, value: int, size: int) -> None:
        ctypes.memset(pointer, value & 0xFF, size)

    def memsetAsync(self, pointer: int, value: int, size: int, stream: int) -> None:
        self.memset(pointer, value, size)

    def pointerGetAttributes(self, pointer: int) -> Any:
        made: Any = import_module(_NAME).PointerAttributes
        return made(0, pointer, pointer, self.pointerGetMemoryType(pointer))

    def pointerGetMemoryType(self, pointer: int) -> int:
        return _DEVICE if self._driver.allocation_at(pointer) else _UNREGISTERED

    # -- streams and events: there is no asynchronous work

    def streamCreate(self) -> int:
        return self._of_driver("StreamCreate", 0)

    eventCreate = streamCreate

    def streamCreateWithFlags(self, flags: int) -> int:
        return self.streamCreate()

    eventCreateWithFlags = streamCreateWithFlags

    def streamCreateWithPriority(self, flags: int, priority: int) -> int:
        return self.streamCreate()

    def streamSynchronize(self, stream: int) -> None: ...

    streamDestroy = eventDestroy = eventSynchronize = streamSynchronize

    def streamQuery(self, stream: int) -> int:
        return 0

    streamIsCapturing = eventQuery = streamQuery

    def streamWaitEvent(self, stream: int, event: int, flags: int = 0) -> None: ...

    def eventRecord(self, event: int, stream: int) -> None: ...

    def eventElapsedTime(self, start: int, end: int) -> float:
        return nominal_time()
