"""The CUDA runtime and driver of this process, as compiled host code needs them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

# What the DSL's host code calls -> the function of the runtime or driver that it is a jump to.
_CUDA = {
    "_cudaLaunchKernelEx": "cudaLaunchKernelExC",
    **{
        "_" + name: name
        for name in (
            *("cudaLibraryLoadData", "cudaLibraryGetKernel", "cudaKernelSetAttributeForDevice"),
            *("cudaFuncSetAttribute", "cudaGetDevice", "cudaGetDeviceCount"),
            *("cudaDeviceGetAttribute", "cudaOccupancyMaxActiveBlocksPerMultiprocessor"),
            *("cuKernelGetAttribute", "cuTensorMapEncodeTiled"),
        )
    },
}


@cache
def runtime_symbol(name: str) -> int:
    """Address of what host code of the DSL calls `name`: of the CUDA runtime that torch has loaded,
    of the driver, or of the C library. RuntimeError for a name that none of them has."""
    plain = _CUDA.get(name, name)
    if plain is name and name.startswith(("_cu", "cuda_dialect_", "CuteDSLRT_")):
        raise RuntimeError(f"compiled host code calls {name}, which kernelkit does not provide")
    library = _library_of(plain)
    function = getattr(library, plain, None)
    if function is None:
        raise RuntimeError(f"compiled host code calls {name}, which {library._name} does not have")
    return ctypes.cast(function, ctypes.c_void_p).value


def _library_of(name: str) -> ctypes.CDLL:
    if name.startswith("cuda"):
        return _runtime()
    return ctypes.CDLL("libcuda.so.1" if name.startswith("cu") else None)


@cache
def _runtime() -> ctypes.CDLL:
    """libcudart, the one that torch uses, so that contexts and streams are the same."""
    if torch.version.cuda is None:
        raise RuntimeError("this torch is built without CUDA")
    torch.cuda.init()
    return ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}")


def check_result(code: int) -> None:
    """RuntimeError that names a cudaError_t other than 0."""
    if code:
        from cuda.bindings import runtime

        raise RuntimeError(f"the launch failed: {runtime.cudaError_t(code)!r}")


_EMPTY = b""".version 8.0
.target sm_90
.address_size 64
.visible .entry empty() { ret; }
"""


def most_clusters(ctas: int) -> int:
    """Clusters of `ctas` CTAs of one thread each, one CTA to an SM, that the current device runs at
    the same time: what the driver says of a kernel that takes all shared memory of an SM.

    A stream may be capturing: engines capture a step whose kernels were never launched before.
    """
    from cuda.bindings import driver

    def checked(result: tuple) -> object:
        if result[0] != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(
                f"the driver does not report active clusters of {ctas} CTAs: {result[0]!r}"
            )
        return result[1] if len(result) > 1 else None

    _make_current(driver, checked)
    # Loading a module is an error while any stream captures, unless this thread allows it.
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = checked(driver.cuThreadExchangeStreamCaptureMode(relaxed))
    try:
        return _ask_driver(driver, checked, ctas)
    finally:
        checked(driver.cuThreadExchangeStreamCaptureMode(before))


def _make_current(driver: Any, checked: Callable[[tuple], Any]) -> None:
    """Make torch's context that of this thread, without a call that waits for a stream."""
    if int(checked(driver.cuCtxGetCurrent())) == 0:
        device = checked(driver.cuDeviceGet(torch.cuda.current_device()))
        checked(driver.cuCtxSetCurrent(checked(driver.cuDevicePrimaryCtxRetain(device))))


def _ask_driver(driver: Any, checked: Callable[[tuple], Any], ctas: int) -> int:
    """`most_clusters`, where the context is current."""
    module = checked(driver.cuModuleLoadData(_EMPTY))
    function = checked(driver.cuModuleGetFunction(module, b"empty"))
    most = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    nbytes = checked(driver.cuDeviceGetAttribute(most, checked(driver.cuCtxGetDevice())))
    settings = driver.CUfunction_attribute
    for name, value in (
        (settings.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, nbytes),
        (settings.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1),
    ):
        checked(driver.cuFuncSetAttribute(function, name, value))
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = ctas, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = 1, 1, 1
    config.sharedMemBytes = nbytes
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    size = attribute.value.clusterDim
    size.x, size.y, size.z = ctas, 1, 1
    config.attrs, config.numAttrs = [attribute], 1
    found = checked(driver.cuOccupancyMaxActiveClusters(function, config))
    checked(driver.cuModuleUnload(module))
    return found
