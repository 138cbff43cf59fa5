"""Answers of the CUDA driver, the runtime and the DSL's utilities on a machine with one GPU.

Only what scripts need before and after their launches: counts, versions, attributes, streams,
waiting, and the runtime's simplest allocation.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from importlib import import_module
from typing import Any

from ptxemu.host import gpus
from ptxemu.host.allocations import LIVE
from ptxemu.host.patching import patched
from ptxemu.host.runtime_symbols import device_attribute

VERSION = 13000  # CUDA 13.0
_ALIGNMENT = 256
MEANINGLESS_TIME = 1.0  # an emulated kernel has no duration; scripts divide by what they measure


@contextmanager
def stubbed_cuda() -> Iterator[None]:
    """While active, cuda-bindings and the DSL's hardware queries and benchmarks need no GPU."""
    import cutlass.cute as cute
    from cuda.bindings import driver, runtime
    from cutlass.utils import HardwareInfo

    def benchmark(*_: Any, **__: Any) -> float:
        return nominal_time()

    testing: list[Any] = [cute.testing]
    with suppress(ImportError):  # before 4.8 there is the one below cute alone
        testing.append(import_module("cutlass.testing"))

    changes: list[tuple[Any, dict[str, Any]]] = [
        (driver, _driver(driver)),
        (runtime, _runtime(runtime)),
        (HardwareInfo, _HARDWARE_INFO),
        *((each, _benchmarks(each, benchmark)) for each in testing),
        # Libraries that preload the CUDA runtime would find no driver.
        (cute.runtime, {"find_runtime_libraries": constantly([])}),
    ]
    with ExitStack() as stack:
        for target, replacements in changes:
            stack.enter_context(patched(target, replacements))
        yield


def _benchmarks(module: Any, function: Callable[..., float]) -> dict[str, Any]:
    """Map to `function` those benchmarks that this version of the module has."""
    return dict.fromkeys({"benchmark", "_benchmark_for_autotune"} & {*vars(module)}, function)


_HARDWARE_INFO = {
    "__init__": lambda self, device_id=0: None,
    "get_max_active_clusters": lambda self, cluster_size, stream=None: max(
        1, gpus.current().sms // cluster_size
    ),
    "get_l2_cache_size_in_bytes": lambda self: gpus.current().l2_bytes,
    "get_device_multiprocessor_count": lambda self: gpus.current().sms,
}


def _driver(driver: Any) -> dict[str, Callable[..., tuple[Any, ...]]]:
    """Functions of the driver interface: tuples of success and the answer."""
    success = driver.CUresult.CUDA_SUCCESS
    answers: dict[str, tuple[Any, ...]] = {
        "cuInit": (),
        "cuDriverGetVersion": (VERSION,),
        "cuDeviceGetCount": (1,),
        "cuDeviceGet": (driver.CUdevice(0),),
        "cuDeviceGetName": (gpus.current().name.encode(),),
        "cuDeviceTotalMem": (gpus.current().memory_bytes,),
        "cuDeviceComputeCapability": gpus.current().capability,
        "cuMemGetInfo": (gpus.current().memory_bytes,) * 2,
        "cuCtxCreate": (driver.CUcontext(0),),
        "cuCtxGetCurrent": (driver.CUcontext(0),),
        "cuCtxGetDevice": (driver.CUdevice(0),),
        "cuCtxSetCurrent": (),
        "cuCtxSynchronize": (),
        "cuDevicePrimaryCtxRetain": (driver.CUcontext(0),),
        "cuStreamCreate": (driver.CUstream(0),),
        "cuStreamSynchronize": (),
        "cuStreamDestroy": (),
    }
    return _answering(success, answers) | {"cuDeviceGetAttribute": _attribute(success)}


def _runtime(runtime: Any) -> dict[str, Callable[..., tuple[Any, ...]]]:
    """Functions of the runtime interface: tuples of success and the answer."""
    success = runtime.cudaError_t.cudaSuccess
    heap = _Heap(success)
    answers: dict[str, tuple[Any, ...]] = {
        "cudaDriverGetVersion": (VERSION,),
        "cudaRuntimeGetVersion": (VERSION,),
        "cudaGetDevice": (0,),
        "cudaGetDeviceCount": (1,),
        "cudaSetDevice": (),
        "cudaMemGetInfo": (gpus.current().memory_bytes,) * 2,
        "cudaDeviceSynchronize": (),
        "cudaStreamCreate": (runtime.cudaStream_t(0),),
        "cudaStreamSynchronize": (),
        "cudaStreamDestroy": (),
    }
    return _answering(success, answers) | {
        "cudaDeviceGetAttribute": _attribute(success),
        "cudaMalloc": heap.malloc,
        "cudaFree": heap.free,
        "cudaMemset": heap.memset,
        "cudaGetDeviceProperties": lambda *_: (success, _properties(runtime)),
    }


def _properties(runtime: Any) -> Any:
    """Return the cudaDeviceProp of the GPU; what is not known is 0."""
    gpu = gpus.current()
    found = runtime.cudaDeviceProp()
    found.name = gpu.name.encode().ljust(256, b"\0")  # all of the field
    found.major, found.minor = gpu.capability
    found.totalGlobalMem = gpu.memory_bytes
    for name, number in _PROPERTIES.items():
        setattr(found, name, gpu.attribute(number))
    return found


# Fields of cudaDeviceProp -> cudaDeviceAttr.
_PROPERTIES = {
    "multiProcessorCount": 16,
    "l2CacheSize": 38,
    "maxThreadsPerBlock": 1,
    "maxThreadsPerMultiProcessor": 39,
    "regsPerBlock": 12,
    "regsPerMultiprocessor": 82,
    "sharedMemPerBlock": 8,
    "sharedMemPerBlockOptin": 97,
    "sharedMemPerMultiprocessor": 81,
    "warpSize": 10,
}


@lru_cache(maxsize=1)
def _say_that_time_is_nominal() -> None:
    """Once in a process, on stderr."""
    print(
        "ptxemu: kernels are emulated here, so a measured time means nothing: every measurement"
        f" answers {MEANINGLESS_TIME:g}",
        file=sys.stderr,
    )


def nominal_time() -> float:
    """Return a nominal time for a measurement; the first call warns that it is not real."""
    _say_that_time_is_nominal()
    return MEANINGLESS_TIME


def constantly(answer: Any) -> Callable[..., Any]:
    return lambda *_, **__: answer


def _answering(success: Any, answers: dict[str, tuple[Any, ...]]) -> dict[str, Callable[..., Any]]:
    return {name: constantly((success, *answer)) for name, answer in answers.items()}


def _attribute(success: Any) -> Callable[..., tuple[Any, ...]]:
    return lambda attribute, _device=0: (success, device_attribute(int(attribute)))


class _Heap:
    """Device memory of the runtime interface: zeroed host memory, aligned like cudaMalloc's."""

    def __init__(self, success: Any) -> None:
        self._success = success
        self._blocks: dict[int, Any] = {}

    def malloc(self, nbytes: int) -> tuple[Any, ...]:
        block = ctypes.create_string_buffer(nbytes + _ALIGNMENT)
        address = -(-ctypes.addressof(block) // _ALIGNMENT) * _ALIGNMENT
        self._blocks[address] = block
        LIVE.note_memory(block, address, nbytes)
        return self._success, address

    def free(self, address: int) -> tuple[Any, ...]:
        del self._blocks[int(address)]
        return (self._success,)

    def memset(self, address: int, value: int, nbytes: int) -> tuple[Any, ...]:
        ctypes.memset(int(address), value, nbytes)
        return (self._success,)
