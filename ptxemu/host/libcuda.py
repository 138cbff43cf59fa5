"""`libcuda.so.1` for programs that load the driver themselves: cuda.bindings, cuda.core, Numba.

The library is written by `shared_library`; its functions are Python. It has one GPU, one context,
memory of the host, streams without work, and modules of PTX. A launch goes to the launcher of the
pretence. Machine code cannot be executed: a cubin is refused with CUDA_ERROR_NO_BINARY_FOR_GPU.
Programs that use the CUDA runtime library are not expected to run, since the runtime asks the
driver for tables that are not documented; `cupy_runtime` replaces it for CuPy.
"""

from __future__ import annotations

import atexit
import ctypes
import inspect
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ptxemu.errors import PtxEmuError
from ptxemu.host import gpus, shared_library
from ptxemu.host.allocations import LIVE
from ptxemu.host.cuda_stubs import VERSION, nominal_time
from ptxemu.host.emulator import variable_of
from ptxemu.host.launch_config import (
    LaunchAttributes,
    LaunchConfig,
    parameter_sizes,
    read_config,
    requested,
    require_settable,
)
from ptxemu.host.runtime_symbols import Launcher
from ptxemu.host.tensor_map_encode import encode_pixels, encode_tiled
from ptxemu.machine.shape import target_of

SUCCESS = 0
_INVALID_VALUE, _NO_DEVICE, _INVALID_DEVICE, _NO_BINARY = 1, 100, 101, 209
_NOT_FOUND, _LAUNCH_FAILED, _UNSUPPORTED = 500, 719, 801
_NAMES = {0: b"CUDA_SUCCESS", 1: b"CUDA_ERROR_INVALID_VALUE", 209: b"CUDA_ERROR_NO_BINARY_FOR_GPU",
          500: b"CUDA_ERROR_NOT_FOUND", 719: b"CUDA_ERROR_LAUNCH_FAILED",
          801: b"CUDA_ERROR_NOT_SUPPORTED"}  # fmt: skip
_TEXTS = {code: ctypes.create_string_buffer(name) for code, name in _NAMES.items()}
_CONTEXT = 0xC0DA  # the one handle of a context
_ALIGNMENT = 512
_ELF = b"\x7fELF"
_REGISTERS, _MAX_DYNAMIC = 4, 8  # CUfunction_attribute
_KIND_DEVICE = 2  # CU_MEMORYTYPE_DEVICE


class _Failed(Exception):
    """Error with the CUresult that the caller gets."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass
class _Image:
    """A loaded module; functions: name -> handle."""

    ptx: str
    functions: dict[str, int] = field(default_factory=dict)


@dataclass
class _Function:
    """A kernel of a module, with what was set for it by CUfunction_attribute."""

    image: int
    ptx: str
    name: str
    attributes: dict[int, int] = field(default_factory=dict)


def _put(address: int, value: int, kind: Any = ctypes.c_uint64) -> None:
    if address:
        kind.from_address(address).value = value


def _signed(value: int) -> int:
    return ctypes.c_int32(value & 0xFFFFFFFF).value


def _narrowed(values: Sequence[int], places: Sequence[int]) -> list[int]:
    """The values, those at `places` as int32."""
    return [_signed(value) if at in places else value for at, value in enumerate(values)]


class Driver:
    """The functions: a public method has the name of the driver's without `cu`, and its arguments
    as integers. It returns for success. Handles are numbers."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._handles: dict[int, Any] = {}
        self._next = 0x10000
        self._memory: dict[int, np.ndarray] = {}
        self._contexts: list[int] = []
        self.addresses: dict[str, int] = {}  # of the exported functions

    def _handle(self, value: Any) -> int:
        self._next += 16
        self._handles[self._next] = value
        return self._next

    # -- the driver, the device and its context

    def Init(self, flags: int) -> None: ...

    def DriverGetVersion(self, version: int) -> None:
        _put(version, VERSION, ctypes.c_int32)

    def GetProcAddress(self, symbol: int, function: int, version: int, flags: int) -> None:
        self.GetProcAddress_v2(symbol, function, version, flags, 0)

    def GetProcAddress_v2(
        self, symbol: int, function: int, version: int, flags: int, status: int
    ) -> None:
        name = ctypes.string_at(symbol).decode()
        address = self.addresses.get(name, 0)
        _put(function, address)
        _put(status, 0 if address else 1, ctypes.c_int32)
        if not address:
            raise _Failed(_NOT_FOUND, "")

    def GetExportTable(self, table: int, uuid: int) -> None:
        """There are no undocumented tables; NVRTC dies where the function itself is missing."""
        _put(table, 0)
        raise _Failed(_NOT_FOUND, "")

    def GetErrorName(self, error: int, text: int) -> None:
        _put(text, ctypes.addressof(_TEXTS.get(_signed(error), _TEXTS[_INVALID_VALUE])))

    GetErrorString = GetErrorName

    def DeviceGet(self, device: int, ordinal: int) -> None:
        if ordinal & 0xFFFFFFFF:
            raise _Failed(_INVALID_DEVICE, "")
        _put(device, 0, ctypes.c_int32)

    def DeviceGetCount(self, count: int) -> None:
        _put(count, 1, ctypes.c_int32)

    def DeviceGetName(self, text: int, size: int, device: int) -> None:
        raw = gpus.current().name.encode()[: (size & 0xFFFFFFFF) - 1] + b"\0"
        ctypes.memmove(text, raw, len(raw))

    def DeviceGetUuid(self, uuid: int, device: int) -> None:
        ctypes.memset(uuid, 0, 16)

    def DeviceTotalMem(self, size: int, device: int) -> None:
        _put(size, gpus.current().memory_bytes)

    def DeviceGetAttribute(self, value: int, attribute: int, device: int) -> None:
        _put(value, gpus.current().attribute(attribute & 0xFFFFFFFF) or 0, ctypes.c_int32)

    def DeviceComputeCapability(self, major: int, minor: int, device: int) -> None:
        for address, part in zip((major, minor), gpus.current().capability, strict=True):
            _put(address, part, ctypes.c_int32)

    def DeviceGetPCIBusId(self, text: int, size: int, device: int) -> None:
        ctypes.memmove(text, b"0000:00:00.0\0", 13)

    def DeviceCanAccessPeer(self, answer: int, device: int, peer: int) -> None:
        _put(answer, 0, ctypes.c_int32)

    def DevicePrimaryCtxRetain(self, context: int, device: int) -> None:
        _put(context, _CONTEXT)

    def DevicePrimaryCtxRelease(self, device: int) -> None: ...

    DevicePrimaryCtxReset = DevicePrimaryCtxRelease

    def DevicePrimaryCtxGetState(self, device: int, flags: int, active: int) -> None:
        _put(flags, 0, ctypes.c_int32)
        _put(active, 1, ctypes.c_int32)

    def CtxCreate(self, context: int, flags: int, device: int) -> None:
        _put(context, _CONTEXT)
        self._contexts.append(_CONTEXT)

    def CtxDestroy(self, context: int) -> None: ...

    def CtxGetCurrent(self, context: int) -> None:
        _put(context, self._contexts[-1] if self._contexts else 0)

    def CtxSetCurrent(self, context: int) -> None:
        self._contexts[-1:] = [context] if context else []

    def CtxPushCurrent(self, context: int) -> None:
        self._contexts.append(context)

    def CtxPopCurrent(self, context: int) -> None:
        _put(context, self._contexts.pop() if self._contexts else 0)

    def CtxGetDevice(self, device: int) -> None:
        _put(device, 0, ctypes.c_int32)

    def CtxGetStreamPriorityRange(self, least: int, greatest: int) -> None:
        _put(least, 0, ctypes.c_int32)
        _put(greatest, 0, ctypes.c_int32)

    def CtxSynchronize(self) -> None: ...

    ProfilerStart = ProfilerStop = CtxSynchronize

    # -- memory

    def MemAlloc(self, pointer: int, size: int) -> None:
        memory = np.zeros(size + _ALIGNMENT, np.uint8)
        start = -(-memory.ctypes.data // _ALIGNMENT) * _ALIGNMENT
        self._memory[start] = memory
        LIVE.note_memory(memory, start, size)
        _put(pointer, start)

    def MemFree(self, pointer: int) -> None:
        if pointer and self._memory.pop(pointer, None) is None:
            raise _Failed(_INVALID_VALUE, f"cuMemFree of 0x{pointer:x}, which was not allocated")

    MemFreeHost = MemFree

    def MemAllocHost(self, pointer: int, size: int) -> None:
        self.MemAlloc(pointer, size)

    def MemHostAlloc(self, pointer: int, size: int, flags: int) -> None:
        self.MemAlloc(pointer, size)

    MemAllocAsync = MemAllocManaged = MemHostAlloc

    def MemFreeAsync(self, pointer: int, stream: int) -> None:
        self.MemFree(pointer)

    def MemGetInfo(self, free: int, total: int) -> None:
        _put(free, gpus.current().memory_bytes)
        _put(total, gpus.current().memory_bytes)

    def MemHostRegister(self, pointer: int, size: int, flags: int) -> None: ...

    def MemHostUnregister(self, pointer: int) -> None: ...

    def MemHostGetDevicePointer(self, pointer: int, host: int, flags: int) -> None:
        _put(pointer, host)

    def MemGetAddressRange(self, base: int, size: int, pointer: int) -> None:
        found = self.allocation_at(pointer)
        if found is None:
            raise _Failed(_INVALID_VALUE, f"no allocation has the address 0x{pointer:x}")
        _put(base, found[0])
        _put(size, found[1])

    def allocation_at(self, pointer: int) -> tuple[int, int] | None:
        """Return start and bytes of the allocation that holds an address."""
        for start, memory in self._memory.items():
            nbytes = memory.nbytes - _ALIGNMENT
            if start <= pointer < start + max(nbytes, 1):
                return start, nbytes
        return None

    def PointerGetAttribute(self, value: int, attribute: int, pointer: int) -> None:
        answers = {1: _CONTEXT, 2: _KIND_DEVICE, 3: pointer, 4: pointer, 9: 0}
        if attribute not in answers:
            raise _Failed(_UNSUPPORTED, f"CUpointer_attribute {attribute}")
        narrow = attribute in (2, 9)
        _put(value, answers[attribute], ctypes.c_int32 if narrow else ctypes.c_uint64)

    def Memcpy(self, target: int, source: int, size: int) -> None:
        ctypes.memmove(target, source, size)

    MemcpyHtoD = MemcpyDtoH = MemcpyDtoD = Memcpy

    def MemcpyAsync(self, target: int, source: int, size: int, stream: int) -> None:
        ctypes.memmove(target, source, size)

    MemcpyHtoDAsync = MemcpyDtoHAsync = MemcpyDtoDAsync = MemcpyAsync

    def MemsetD8(self, pointer: int, value: int, count: int) -> None:
        ctypes.memset(pointer, value & 0xFF, count)

    def MemsetD8Async(self, pointer: int, value: int, count: int, stream: int) -> None:
        self.MemsetD8(pointer, value, count)

    def MemsetD16(self, pointer: int, value: int, count: int) -> None:
        (ctypes.c_uint16 * count).from_address(pointer)[:] = [value & 0xFFFF] * count

    def MemsetD16Async(self, pointer: int, value: int, count: int, stream: int) -> None:
        self.MemsetD16(pointer, value, count)

    def MemsetD32(self, pointer: int, value: int, count: int) -> None:
        (ctypes.c_uint32 * count).from_address(pointer)[:] = [value & 0xFFFFFFFF] * count

    def MemsetD32Async(self, pointer: int, value: int, count: int, stream: int) -> None:
        self.MemsetD32(pointer, value, count)

    def TensorMapEncodeTiled(self, *values: int) -> None:
        encode_tiled(*_narrowed(values, (1, 2, 8, 9, 10, 11)))

    def TensorMapEncodeIm2col(self, *values: int) -> None:
        encode_pixels(*_narrowed(values, (1, 2, 8, 9, 11, 12, 13, 14)))

    # -- streams and events

    def StreamCreate(self, stream: int, flags: int) -> None:
        _put(stream, self._handle("stream"))

    EventCreate = StreamCreate

    def StreamCreateWithPriority(self, stream: int, flags: int, priority: int) -> None:
        self.StreamCreate(stream, flags)

    def StreamSynchronize(self, stream: int) -> None: ...

    StreamQuery = StreamDestroy = EventQuery = EventDestroy = EventSynchronize = StreamSynchronize

    def StreamWaitEvent(self, stream: int, event: int, flags: int) -> None: ...

    EventRecordWithFlags = StreamWaitEvent

    def EventRecord(self, event: int, stream: int) -> None: ...

    def StreamGetPriority(self, stream: int, value: int) -> None:
        _put(value, 0, ctypes.c_int32)

    StreamGetFlags = StreamIsCapturing = StreamGetDevice = StreamGetPriority

    def StreamGetCtx(self, stream: int, context: int) -> None:
        _put(context, _CONTEXT)

    def StreamGetId(self, stream: int, number: int) -> None:
        _put(number, stream)

    def LaunchHostFunc(self, stream: int, function: int, data: int) -> None:
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(data)

    def EventElapsedTime(self, time: int, start: int, end: int) -> None:
        ctypes.c_float.from_address(time).value = nominal_time()

    # -- modules

    def ModuleLoadData(self, module: int, image: int) -> None:
        head = ctypes.string_at(image, 4)
        text = b"" if head == _ELF or head[0] > 127 else ctypes.string_at(image)
        if b".version" not in text:
            raise _Failed(_NO_BINARY, "a module of machine code: ptxemu executes PTX only")
        _put(module, self._handle(_Image(text.decode())))

    def ModuleLoadDataEx(self, module: int, image: int, n: int, options: int, values: int) -> None:
        self.ModuleLoadData(module, image)

    def LibraryLoadData(self, library: int, code: int, *_: int) -> None:
        self.ModuleLoadData(library, code)

    def ModuleUnload(self, module: int) -> None:
        self._handles.pop(module, None)

    LibraryUnload = ModuleUnload

    def ModuleGetFunction(self, function: int, module: int, name: int) -> None:
        image, word = self._handles[module], ctypes.string_at(name).decode()
        if word not in parameter_sizes(image.ptx):
            raise _Failed(_NOT_FOUND, f"the module has no kernel {word!r}")
        if word not in image.functions:
            image.functions[word] = self._handle(_Function(module, image.ptx, word))
        _put(function, image.functions[word])

    LibraryGetKernel = ModuleGetFunction

    def ModuleGetGlobal(self, pointer: int, size: int, module: int, name: int) -> None:
        word = ctypes.string_at(name).decode()
        found = variable_of(self._handles[module].ptx, word)
        if found is None:
            raise _Failed(_NOT_FOUND, f"the module has no variable {word!r}")
        _put(pointer, found[0])
        _put(size, found[1])

    LibraryGetGlobal = ModuleGetGlobal

    def LibraryGetModule(self, module: int, library: int) -> None:
        _put(module, library)

    KernelGetFunction = LibraryGetModule

    def KernelGetLibrary(self, library: int, kernel: int) -> None:
        _put(library, self._handles[kernel].image)

    FuncGetModule = KernelGetLibrary

    def FuncGetAttribute(self, value: int, attribute: int, function: int) -> None:
        major, minor = gpus.current().capability
        binary = 10 * major + minor
        plain = {0: 1024, _REGISTERS: 64, 5: binary, 6: binary, _MAX_DYNAMIC: 48 << 10}
        known = plain | self._handles[function].attributes
        _put(value, known.get(attribute & 0xFFFFFFFF, 0), ctypes.c_int32)

    def KernelGetAttribute(self, value: int, attribute: int, kernel: int, device: int) -> None:
        self.FuncGetAttribute(value, attribute, kernel)

    def FuncSetAttribute(self, function: int, attribute: int, value: int) -> None:
        kernel = self._handles[function]
        require_settable(attribute & 0xFFFFFFFF, _signed(value), target_of(kernel.ptx))
        kernel.attributes[attribute & 0xFFFFFFFF] = _signed(value)

    def KernelSetAttribute(self, attribute: int, value: int, kernel: int, device: int) -> None:
        self.FuncSetAttribute(kernel, attribute, value)

    def FuncSetCacheConfig(self, function: int, config: int) -> None: ...

    def KernelSetCacheConfig(self, kernel: int, config: int, device: int) -> None: ...

    def OccupancyMaxActiveBlocksPerMultiprocessor(
        self, count: int, function: int, threads: int, smem: int
    ) -> None:
        _put(count, 1, ctypes.c_int32)

    def OccupancyMaxActiveClusters(self, count: int, function: int, config: int) -> None:
        _put(count, gpus.current().sms, ctypes.c_int32)

    # -- the linker: it takes one module of PTX, and returns it

    def LinkCreate(self, n: int, options: int, values: int, state: int) -> None:
        _put(state, self._handle([]))

    def LinkAddData(self, state: int, kind: int, data: int, size: int, *_: int) -> None:
        text = ctypes.string_at(data, size)
        if b".version" not in text:
            raise _Failed(_UNSUPPORTED, "linking anything but PTX")
        self._handles[state].append(ctypes.create_string_buffer(text.rstrip(b"\0")))

    def LinkComplete(self, state: int, image: int, size: int) -> None:
        parts = self._handles[state]
        if len(parts) != 1:
            raise _Failed(_UNSUPPORTED, f"linking {len(parts)} modules of PTX; ptxemu links one")
        _put(image, ctypes.addressof(parts[0]))
        _put(size, len(parts[0]))

    def LinkDestroy(self, state: int) -> None:
        self._handles.pop(state, None)

    # -- launches

    def LaunchKernel(self, function: int, *values: int) -> None:
        gx, gy, gz, bx, by, bz, smem = (each & 0xFFFFFFFF for each in values[:7])
        stream, params, extra = values[7:]
        grid, block = (gx, gy, gz), (bx, by, bz)
        config = LaunchConfig(grid, block, smem, stream, LaunchAttributes())
        self._launch(config, function, params, extra)

    def LaunchCooperativeKernel(self, function: int, *values: int) -> None:
        self.LaunchKernel(function, *values, 0)

    def LaunchKernelEx(self, config: int, function: int, params: int, extra: int) -> None:
        read = read_config(config)  # its bytes of shared memory have four of padding behind them
        smem = read.smem_bytes & 0xFFFFFFFF
        self._launch(replace(read, smem_bytes=smem), function, params, extra)

    def _launch(self, config: LaunchConfig, function: int, params: int, extra: int) -> None:
        kernel = self._handles[function]
        if extra and not params:
            raise _Failed(_UNSUPPORTED, "parameters in one buffer (CU_LAUNCH_PARAM_BUFFER_POINTER)")
        named, target = (kernel.ptx, kernel.name), target_of(kernel.ptx)
        self._launcher(requested(named, config, kernel.attributes, params, target=target))


# Arguments of those whose methods do not name all.
_COUNTS = {"TensorMapEncodeTiled": 12, "TensorMapEncodeIm2col": 15, "LibraryLoadData": 8,
           "LinkAddData": 8, "LaunchKernel": 11, "LaunchCooperativeKernel": 10}  # fmt: skip
# What programs still call at the end of the process; an error there is printed, if not more.
_ENDS = ("ModuleUnload", "LibraryUnload", "MemFree", "StreamDestroy", "EventDestroy")
_HARMLESS = {f"cu{name}{version}" for name in _ENDS for version in ("", "_v2")}
# Suffixes of the driver's names: what is used of the arguments is the same in all versions, but for
# one function, which has a method for each.
_VERSIONS = ("", "_v2", "_v3", "_v4")
_OTHER = ("GetProcAddress", "_v2")


@contextmanager
def driver_library(launcher: Launcher) -> Iterator[Driver | None]:
    """Load the library, where the machine can: Linux on x86-64. Yields its functions, or None.

    After the block it stays loaded, since programs keep the addresses of its functions; they then
    return CUDA_ERROR_NO_DEVICE. Where a libcuda was loaded before, programs go on with that.
    """
    if platform.machine() != "x86_64" or sys.platform != "linux":
        yield None
        return
    if _state.library is None:
        _state.load()
    driver = Driver(launcher)
    _state.begin(driver)
    try:
        yield driver
    finally:
        _state.end()


class _State:
    """The library of this process, and the driver that its functions belong to now."""

    def __init__(self) -> None:
        self.library: shared_library.Library | None = None
        self._driver: Driver | None = None
        self._callbacks: list[Any] = []

    def load(self) -> None:
        callbacks: dict[str, Any] = {}
        for name, method in vars(Driver).items():
            if callable(method) and name[0].isupper():
                own = len(inspect.signature(method).parameters) - 1
                callback = self._callback(name, _COUNTS.get(name, own))
                callbacks |= {f"cu{name}{v}": callback for v in _VERSIONS if (name, v) != _OTHER}
        folder = Path(tempfile.mkdtemp(prefix="ptxemu-libcuda-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        path = folder / "libcuda.so.1"
        shared_library.written(path, path.name, [*callbacks], _NO_DEVICE)
        self.library = shared_library.Library(path, [*callbacks], _HARMLESS)
        self._callbacks = [*callbacks.values()]
        atexit.register(self.library.rest)

    def begin(self, driver: Driver) -> None:
        if self.library is not None:
            driver.addresses, self._driver = self.library.addresses, driver
            self.library.call(self._callbacks)

    def end(self) -> None:
        if self.library is not None:
            self.library.rest()
            self._driver = None

    def _callback(self, name: str, count: int) -> Any:
        def call(*values: int) -> int:
            return self._answered(name, values)

        return ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_size_t] * count)(call)

    def _answered(self, name: str, values: tuple[int, ...]) -> int:
        """Call a function; print an error that it raises, and return it as a CUresult."""
        try:
            function: Callable[..., None] = getattr(self._driver, name)
            function(*values)
        except _Failed as failed:
            if str(failed):
                print(f"ptxemu: cu{name}: {failed}", file=sys.stderr)
            return failed.code
        except Exception as error:  # noqa: BLE001  (none may enter compiled code)
            print(f"ptxemu: cu{name}: {type(error).__name__}: {error}", file=sys.stderr)
            return _LAUNCH_FAILED if isinstance(error, PtxEmuError) else _INVALID_VALUE
        return SUCCESS


_state = _State()
