"""The CUDA runtime as lowered host code sees it: one ctypes callback per symbol that it calls.

The DSL lowers a host function to LLVM that calls `_cudaLaunchKernelEx` and about twenty related
functions of its runtime library. Here they are Python: loading a library returns handles, device
queries describe the chosen GPU, and a launch goes to the launcher of the current `Run`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from ptxemu.errors import HardwareRefusal
from ptxemu.host import gpus
from ptxemu.host.launch_config import (
    LaunchAttributes,
    LaunchConfig,
    LaunchRequest,
    read_config,
    requested,
    require_settable,
)
from ptxemu.host.tensor_map_encode import encode_pixels, encode_tiled
from ptxemu.machine.shape import target_of
from ptxemu.one_launch import launch_lock

Launcher = Callable[[LaunchRequest], Any]

_SUCCESS = 0
_LAUNCH_FAILURE = 719  # cudaErrorLaunchFailure
_LIBRARY = 1  # the one library handle; a host module carries one binary
_PREFIXES_OF_CUDA = ("_cu", "cuda_dialect_", "CuteDSLRT_")

_ARGUMENT = {"p": ctypes.c_size_t, "i": ctypes.c_int32, "q": ctypes.c_uint64}


class UnsupportedRuntimeCall(RuntimeError):
    """The host code asked the CUDA runtime for something that is not emulated."""


def device_attribute(identifier: int, target: str = "") -> int:
    """Return the value of a cudaDeviceAttr of the GPU that this process seems to have.

    The driver's CUdevice_attribute has the same numbers. Shared memory, all of which the host code
    of the DSL asks for, is that of a GPU of `target` if that is given.
    """
    value = gpus.current().attribute(identifier, target)
    if value is None:
        raise UnsupportedRuntimeCall(f"device attribute {identifier} of the emulated GPU")
    return value


@dataclass
class Run:
    """Call of a host function: its launcher, the launches' results, and an error.

    As a context manager it makes itself the current run, the only one of the process. On exit it
    raises the first exception of a callback, in place of the host code's reaction to the error
    code it was given.
    """

    launcher: Launcher
    results: list[Any] = field(default_factory=list)
    error: BaseException | None = None

    def __enter__(self) -> Run:
        self._lock = launch_lock()
        self._lock.acquire()
        self._token = _CURRENT.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _CURRENT.reset(self._token)
        self._lock.release()
        if self.error is not None:
            raise self.error from None


_CURRENT: ContextVar[Run | None] = ContextVar("ptxemu_run", default=None)


class _Recorded:
    """Records an exception of a callback for the current run; none may enter compiled code."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> bool:
        run = _CURRENT.get()
        if error is not None and run is not None and run.error is None:
            run.error = error
        return True


def _symbol(name: str, arguments: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Mark a method as a runtime symbol; `arguments` are p(ointer), i (int32) or q (uint64)."""

    def mark(method: Any) -> Callable[..., Any]:
        method.symbols = [*getattr(method, "symbols", ()), (name, arguments)]
        return method

    return mark


def _write_pointer(address: int, value: int) -> None:
    ctypes.c_uint64.from_address(address).value = value


def _writes(value: int) -> Callable[..., None]:
    """Return a query that writes a constant to its first address."""

    def write(_: Any, address: int, *__: int) -> None:
        ctypes.c_int32.from_address(address).value = value

    return write


class RuntimeSymbols:
    """Callbacks of one host module, whose kernels are the entries of `ptx`.

    They exist as long as this object, which must outlive every engine that calls them.
    """

    def __init__(self, ptx: str) -> None:
        self._ptx, self._target = ptx, target_of(ptx)
        self._image = 0  # where its machine code is
        self._entries: dict[int, str] = {}  # kernel handle -> entry name
        self._attributes: dict[str, dict[int, int]] = {}  # entry name -> cudaFuncAttribute -> value
        self._callbacks: dict[str, Any] = {}

    def bind(self, undefined: Iterable[str]) -> dict[str, int]:
        """Return addresses of the undefined symbols that belong to the CUDA runtime.

        A symbol of the runtime that is not emulated gets a callback that fails with its name.
        """
        known = {
            name: (method, arguments)
            for method in map(self.__getattribute__, _SYMBOL_METHODS)
            for name, arguments in method.symbols
        }
        for name in undefined:
            if name in _ETERNAL:
                self._callbacks[name] = _ETERNAL[name]
            elif name in known:
                self._callbacks[name] = self._callback(*known[name])
            elif name.startswith(_PREFIXES_OF_CUDA):
                self._callbacks[name] = self._callback(_refuse(name), "")
        return {
            name: ctypes.cast(callback, ctypes.c_void_p).value or 0
            for name, callback in self._callbacks.items()
        }

    def _callback(self, function: Callable[..., Any], arguments: str) -> Any:
        """Wrap a function for C: it returns 0, or an error code after an exception."""

        def guarded(*values: int) -> int:
            with _Recorded():
                function(*values)
                return _SUCCESS
            return _LAUNCH_FAILURE

        prototype = ctypes.CFUNCTYPE(ctypes.c_int32, *(_ARGUMENT[a] for a in arguments))
        return prototype(guarded)

    # ---- libraries and kernels

    @_symbol("_cudaLibraryLoadData", "pppppppp")
    def _load_library(self, library: int, image: int, *_: int) -> None:
        self._image = image
        _write_pointer(library, _LIBRARY)

    @_symbol("_cudaLibraryGetKernel", "ppp")
    def _get_kernel(self, kernel: int, _library: int, name: int) -> None:
        handle = len(self._entries) + 1
        self._entries[handle] = ctypes.string_at(name).decode()
        _write_pointer(kernel, handle)

    @_symbol("cuda_dialect_init_library_once", "pppp")
    def _init_library_once(self, state: int, init: int, load: int, *_: int) -> None:
        """The tvm-ffi prologue: `state` is the library slot, zero until the first call."""
        if ctypes.c_uint64.from_address(state).value:
            return
        codes = (
            ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(init)(state),
            ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32)(load)(state, 0),
        )
        if any(codes):
            _set_ffi_error("the module's library could not be loaded")
            raise RuntimeError(f"loading the module's library returned the CUDA errors {codes}")

    @_symbol("_cudaKernelSetAttributeForDevice", "piii")
    @_symbol("_cudaFuncSetAttribute", "pii")
    def _set_kernel_attribute(self, kernel: int, attribute: int, value: int, _: int = 0) -> None:
        require_settable(attribute, value, self._target)
        self._attributes.setdefault(self._entries[kernel], {})[attribute] = value

    @_symbol("_cudaSetDevice", "i")
    @_symbol("_cudaDeviceSynchronize", "")
    @_symbol("_cudaStreamSynchronize", "p")
    @_symbol("_cudaEventRecord", "pp")
    @_symbol("_cudaStreamWaitEvent", "ppi")
    def _nothing_to_do(self, *_: int) -> None:
        """A device that is always the same, and waits for work that is always done."""

    # ---- queries

    _get_device = _symbol("_cudaGetDevice", "p")(_writes(0))
    _get_device_count = _symbol("_cudaGetDeviceCount", "p")(_writes(1))
    _get_occupancy = _symbol("_cudaOccupancyMaxActiveBlocksPerMultiprocessor", "ppiq")(_writes(1))
    # asked for static shared memory before a launch; the emulator checks the sum itself
    _get_kernel_attribute = _symbol("_cuKernelGetAttribute", "pipi")(_writes(0))

    @_symbol("_cudaDeviceGetAttribute", "pii")
    def _get_device_attribute(self, value: int, attribute: int, _device: int) -> None:
        _writes(device_attribute(attribute, self._target))(self, value)

    @_symbol("_cuTensorMapEncodeTiled", "piipppppiiii")
    def _encode_tensor_map(self, *values: int) -> None:
        encode_tiled(*values)

    @_symbol("_cuTensorMapEncodeIm2col", "piipppppiipiiii")
    def _encode_pixel_map(self, *values: int) -> None:
        encode_pixels(*values)

    @_symbol("cuda_dialect_assert_success", "i")
    @_symbol("cuda_dialect_print_on_error", "i")
    def _assert_success(self, code: int) -> None:
        """Raise an error for a code that the host code ignores; its callback recorded the
        reason."""
        if code:
            raise RuntimeError(f"CUDA error {code}")

    # ---- errors of the tvm-ffi wrapper

    @_symbol("CuteDSLRT_TVMFFISetRaisedCudaError", "pi")
    def _set_raised_error(self, _set_error: int, code: int) -> None:
        _set_ffi_error(f"CUDA error {code}")

    @_symbol("CuteDSLRT_TVMFFISetRaisedCudaLaunchError", "piiiiiii")
    def _set_raised_launch_error(self, _set_error: int, *sizes: int) -> None:
        """The preflight check of `debug{launch-check}` found a limit of the device exceeded."""
        message = f"CUDA would refuse grid {sizes[0:3]}, block {sizes[3:6]}, {sizes[6]} threads"
        _set_ffi_error(message)
        raise HardwareRefusal(message)

    # ---- launches

    @_symbol("_cudaLaunchKernelEx", "ppp")
    def _launch_kernel_ex(self, config: int, kernel: int, params: int) -> None:
        self._launch(read_config(config), kernel, params)

    @_symbol("_cudaLaunchKernel", "piiiiiippp")
    def _launch_kernel(self, kernel: int, *values: int) -> None:
        gx, gy, gz, bx, by, bz, params, smem_bytes, stream = values
        grid, block = (gx, gy, gz), (bx, by, bz)
        config = LaunchConfig(grid, block, smem_bytes, stream, LaunchAttributes())
        self._launch(config, kernel, params)

    def _launch(self, config: LaunchConfig, kernel: int, params: int) -> None:
        run = _CURRENT.get()
        if run is None:
            raise UnsupportedRuntimeCall("a launch outside ptxemu.run")
        if run.error is not None:
            raise run.error
        entry = self._entries[kernel]
        named, attributes = (self._ptx, entry), self._attributes.get(entry, {})
        request = requested(
            named, config, attributes, params, target=self._target, image=self._image
        )
        run.results.append(run.launcher(request))


def _set_ffi_error(message: str) -> None:
    """Set an error object, since tvm-ffi dereferences null on an error return without one."""
    ctypes.CDLL(None).TVMFFIErrorSetRaisedFromCStr(b"RuntimeError", message.encode())


def _refuse(name: str) -> Callable[..., None]:
    def refuse(*_: int) -> None:
        raise UnsupportedRuntimeCall(f"the host code calls {name}, which is not emulated")

    return refuse


_ERROR_NAME = ctypes.create_string_buffer(b"cudaErrorLaunchFailure")

# Those that return no error code. The first is called when an engine is destroyed, perhaps after
# its RuntimeSymbols, so these are never collected.
_ETERNAL = {
    "cuda_dialect_unload_library_once": ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None),
    "cuda_dialect_get_error_name": ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_int32)(
        lambda _: ctypes.addressof(_ERROR_NAME)
    ),
}

_SYMBOL_METHODS = [
    name for name, value in vars(RuntimeSymbols).items() if hasattr(value, "symbols")
]
