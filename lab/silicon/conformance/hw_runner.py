"""Runs a test program on a GPU: the PTX text goes to the driver through cuda-python.

Every failed call of the driver raises RuntimeError with its name and error. Without a GPU, or
without cuda-python, `run` skips the test. On a GPU before compute capability 10.0 the programs are
retargeted, and one that needs what that GPU lacks is skipped with what the driver's compiler says.
`launch` raises `Lacking` instead and does without pytest.
A driver older than the programs' version of PTX gets them in the version that it takes.
"""

from __future__ import annotations

import importlib
import re
import subprocess
from functools import lru_cache

import numpy as np

from lab.silicon.conformance.ptx_program import Buffer, Map, Program, Value

NATIVE = (10, 0)  # the compute capability that the programs are written for
_PACKED = "16U"  # begins the types of a tensor map that an older GPU's driver refuses
PORTABLE_CLUSTER = 8  # CTAs that every GPU with clusters can launch
_LOG_BYTES = 1 << 20
_VERSION = re.compile(r"^\.version (\d+)\.(\d+)$", re.MULTILINE)


@lru_cache(maxsize=1)
def _context() -> object:
    """The driver module with device 0's primary context current; skips where there is none."""
    try:
        driver = importlib.import_module("cuda.bindings.driver")
    except ImportError:
        raise Lacking("cuda-python is not installed") from None
    if driver.cuInit(0)[0] != driver.CUresult.CUDA_SUCCESS:
        raise Lacking("no GPU")
    device = _call(driver.cuDeviceGet, 0)
    _call(driver.cuCtxSetCurrent, _call(driver.cuDevicePrimaryCtxRetain, device))
    return driver


def _call(function: object, *arguments: object) -> object:
    """Make a driver call and return its result; a single result is not in a tuple."""
    error, *results = function(*arguments)
    if int(error):
        raise RuntimeError(f"{function.__name__}: {error}")
    return results[0] if len(results) == 1 else tuple(results)


class Lacking(Exception):
    """Something is missing: a GPU, cuda-python, or a GPU feature that a program needs."""


def device() -> dict[str, str]:
    """Describe the device: GPU, target, driver, and the newest PTX version that it accepts."""
    driver = _context()
    asked = ["nvidia-smi", "--id=0", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    name, version = said.strip().split(", ")
    return {
        "gpu": name,
        "target": "sm_{}{}a".format(*_capability(driver)),
        "driver": version,
        "ptx": "{}.{}".format(*_newest_version(driver)),
    }


def run(program: Program) -> dict[str, np.ndarray]:
    """`launch` in a test, which is skipped for what there is not."""
    import pytest

    try:
        return launch(program)
    except Lacking as reason:
        pytest.skip(str(reason))


def launch(program: Program) -> dict[str, np.ndarray]:
    """The outputs after one launch on device 0."""
    driver = _context()
    error, module, said = _load(driver, program.text)
    if error:
        capability = _capability(driver)
        if capability < NATIVE and said:
            raise Lacking(f"not for compute capability {capability}: {said.splitlines()[0]}")
        raise RuntimeError(f"cuModuleLoadDataEx: {error}: {said}")
    addresses: dict[str, object] = {}
    try:
        for buffer in program.buffers():
            addresses[buffer.name] = _upload(driver, buffer.data)
        _launch(driver, program, _kernel(driver, module), addresses)
        _call(driver.cuCtxSynchronize)
        return {
            buffer.name: _download(driver, addresses[buffer.name], buffer.data)
            for buffer in program.outputs()
        }
    finally:
        for address in addresses.values():
            _call(driver.cuMemFree, address)
        _call(driver.cuModuleUnload, module)


def refusal(text: str) -> str:
    """Return the compiler's errors for a module, a line per error; "" if it is accepted."""
    driver = _context()
    error, module, said = _load(driver, text)
    if not error:
        _call(driver.cuModuleUnload, module)
    return (said or str(error)) if error else ""


def _capability(driver: object) -> tuple[int, int]:
    names = (f"CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{part}" for part in ("MAJOR", "MINOR"))
    attributes = (getattr(driver.CUdevice_attribute, name) for name in names)
    return tuple(_call(driver.cuDeviceGetAttribute, attribute, 0) for attribute in attributes)


def _newest_version(driver: object) -> tuple[int, int]:
    """The newest PTX version of the driver, after the release notes of the PTX ISA manual."""
    major, minor = divmod(_call(driver.cuDriverGetVersion) // 10, 100)
    if major >= 13:
        return 9, minor
    return (8, {6: 5, 7: 6, 8: 7, 9: 8}.get(minor, minor)) if major == 12 else (7, minor)


def lowered(text: str, capability: tuple[int, int], newest: tuple[int, int]) -> str:
    """The text for an older GPU, or an older driver."""
    if capability < NATIVE:
        text = text.replace("sm_100a", "sm_{}{}a".format(*capability))
    version = _VERSION.search(text)
    if version and tuple(map(int, version.groups())) > newest:
        text = _VERSION.sub(".version {}.{}".format(*newest), text, count=1)
    return text


def _load(driver: object, text: str) -> tuple[int, object, str]:
    """(error, module, what the compiler said) of the text for the device's own target."""
    text = lowered(text, _capability(driver), _newest_version(driver))
    log, options = bytes(_LOG_BYTES), driver.CUjit_option
    named = [options.CU_JIT_ERROR_LOG_BUFFER, options.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES]
    error, module = driver.cuModuleLoadDataEx(
        text.encode() + b"\0", len(named), named, [log, _LOG_BYTES]
    )
    return int(error), module, log.decode(errors="replace").partition("\0")[0].strip()


def _kernel(driver: object, module: object) -> object:
    """The only kernel of the module."""
    count = _call(driver.cuModuleGetFunctionCount, module)
    if count != 1:
        raise RuntimeError(f"the module has {count} kernels, not one")
    return _call(driver.cuModuleEnumerateFunctions, 1, module)[0]


def _upload(driver: object, data: np.ndarray) -> object:
    address = _call(driver.cuMemAlloc, max(data.nbytes, 16))
    _call(driver.cuMemcpyHtoD, address, data.ctypes.data, data.nbytes)
    return address


def _download(driver: object, address: object, like: np.ndarray) -> np.ndarray:
    out = np.empty_like(like)
    _call(driver.cuMemcpyDtoH, out.ctypes.data, address, out.nbytes)
    return out


def _launch(driver: object, program: Program, kernel: object, addresses: dict[str, object]) -> None:
    """cuLaunchKernelEx with the cluster attribute; parameters are passed by their raw bytes."""
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _call(driver.cuFuncSetAttribute, kernel, attribute, program.smem)
    if np.prod(program.cluster) > PORTABLE_CLUSTER:
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
        _call(driver.cuFuncSetAttribute, kernel, attribute, 1)
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = _padded(program.grid)
    config.blockDimX, config.blockDimY, config.blockDimZ = _padded(program.block)
    config.sharedMemBytes = program.smem
    cluster = driver.CUlaunchAttribute()
    cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    dims = cluster.value.clusterDim
    dims.x, dims.y, dims.z = _padded(program.cluster)
    if program.cluster != (1,):
        config.attrs, config.numAttrs = [cluster], 1
    blocks = [_raw(driver, param, addresses) for param in program.params]
    pointers = np.array([block.ctypes.data for block in blocks], np.uint64)
    _call(driver.cuLaunchKernelEx, config, kernel, pointers.ctypes.data, 0)


def _padded(dims: tuple[int, ...]) -> tuple[int, ...]:
    return (*dims, 1, 1)[:3]


def _raw(driver: object, param: Buffer | Map | Value, addresses: dict[str, object]) -> np.ndarray:
    """The bytes of one kernel parameter."""
    if isinstance(param, Value):
        return param.data
    if isinstance(param, Buffer):
        return np.array([int(addresses[param.name])], np.uint64)
    return _tensor_map(driver, param, addresses[param.of])


def type_name(dtype: str) -> str:
    """Return the driver's name of a tensor map type, without CU_TENSOR_MAP_DATA_TYPE_."""
    prefixes = {"u": "UINT", "f": "FLOAT", "bf": "BFLOAT", "tf": "TFLOAT"}
    letters = dtype.rstrip("0123456789")
    if letters not in prefixes:  # that is one already, of packed elements
        return dtype.upper()
    return prefixes[letters] + dtype.removeprefix(letters)


def _tensor_map(driver: object, tensor: Map, address: object) -> np.ndarray:
    """The 128 bytes that cuTensorMapEncodeTiled or cuTensorMapEncodeIm2col makes."""
    name = type_name(tensor.dtype)
    if name.startswith(_PACKED) and _capability(driver) < NATIVE:
        raise Lacking(f"no tensor map of {tensor.dtype} before compute capability {NATIVE}")
    kinds, modes = driver.CUtensorMapDataType, driver.CUtensorMapSwizzle
    rank, wrapped = len(tensor.dims), driver.cuuint64_t
    box = [driver.cuuint32_t(size) for size in tensor.box]
    encode, sides, steps = driver.cuTensorMapEncodeTiled, [box], [1] * rank
    if tensor.pixels is not None:
        corners = [list(tensor.pixels.lower), list(tensor.pixels.upper)]
        encode, sides = driver.cuTensorMapEncodeIm2col, [*corners, *box]
        steps = [1, *tensor.pixels.strides, 1]
    encoded = _call(
        encode,
        getattr(kinds, f"CU_TENSOR_MAP_DATA_TYPE_{name}"),
        rank,
        address,
        [wrapped(size) for size in tensor.dims],
        [wrapped(size) for size in tensor.strides() or (16,)],  # none is needed, NULL is refused
        *sides,
        [driver.cuuint32_t(step) for step in steps],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(modes, f"CU_TENSOR_MAP_SWIZZLE_{tensor.swizzle.upper()}"),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
        driver.CUtensorMapFloatOOBfill(int(tensor.nan_fill)),
    )
    return np.array([int(word) for word in encoded.opaque], np.uint64)
