"""The CUDA driver by ctypes: PTX loaded, launched with clusters and dynamic shared memory, timed.

Nothing but libcuda.so.1 is needed. Every failed call raises DriverError with its name and number.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import byref, c_char, c_float, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from functools import cached_property

import numpy as np

from lab.silicon.units.ptx import ARCH_OF_CAPABILITY, Map, head

SUCCESS = 0
SHARED_SIZE, NON_PORTABLE = 8, 14  # CUfunction_attribute
CLUSTER, SERIALISED = 4, 6  # CUlaunchAttributeID
SMS, MAJOR, MINOR, L2_BYTES, CLOCK = 16, 75, 76, 38, 13  # CUdevice_attribute
ERROR_LOG, ERROR_LOG_BYTES = 5, 6  # CUjit_option
LOG_BYTES = 1 << 14
HEAD_START = 700_000  # nanoseconds for which the GPU is busy while the host hands work over
BUSY = """\
.visible .entry bench(.param .u64 nanoseconds)
{
.reg .b64 %d<4>;
.reg .pred %p;
ld.param.u64 %d0, [nanoseconds];
mov.u64 %d1, %globaltimer;
add.u64 %d1, %d1, %d0;
MORE:
mov.u64 %d2, %globaltimer;
setp.lt.u64 %p, %d2, %d1;
@%p bra MORE;
ret;
}
"""
U8, NO_INTERLEAVE, SWIZZLES, PROMOTE_NONE, ZEROS = 0, 0, {"none": 0, "128B": 3}, 0, 0


class DriverError(RuntimeError):
    """A call of the driver failed."""


class _Attribute(ctypes.Structure):
    _fields_ = [("id", c_int), ("pad", c_char * 4), ("value", c_uint32 * 16)]


class _Config(ctypes.Structure):
    _fields_ = [
        *((name, c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "smem")),
        ("stream", c_void_p), ("attributes", ctypes.POINTER(_Attribute)), ("count", c_uint),
    ]  # fmt: skip


class Gpu:
    """Device 0 with its primary context. close() frees nothing: the process ends with it."""

    def __init__(self) -> None:
        try:
            self.cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DriverError(f"no driver: {error}") from None
        self.call("cuInit", 0)
        device, context, stream = c_int(), c_void_p(), c_void_p()
        self.call("cuDeviceGet", byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.call("cuStreamCreate", byref(stream), 1)
        self.device, self.stream = device, stream
        self.sms, self.l2_bytes = self.attribute(SMS), self.attribute(L2_BYTES)
        self.capability = f"{self.attribute(MAJOR)}.{self.attribute(MINOR)}"
        if self.capability not in ARCH_OF_CAPABILITY:
            known = ", ".join(ARCH_OF_CAPABILITY)
            raise DriverError(f"no benchmarks for compute capability {self.capability}: {known}")
        self.arch = ARCH_OF_CAPABILITY[self.capability]

    def call(self, name: str, *arguments: object) -> None:
        error = getattr(self.cuda, name)(*arguments)
        if error != SUCCESS:
            text = ctypes.c_char_p()
            self.cuda.cuGetErrorName(error, byref(text))
            raise DriverError(f"{name}: {error} {(text.value or b'').decode()}")

    def attribute(self, number: int) -> int:
        value = c_int()
        self.call("cuDeviceGetAttribute", byref(value), number, self.device)
        return value.value

    def describe(self) -> dict[str, object]:
        """The name and figures of the device, and the driver's version."""
        name, version = ctypes.create_string_buffer(128), c_int()
        self.call("cuDeviceGetName", name, 128, self.device)
        self.call("cuDriverGetVersion", byref(version))
        return {
            "name": name.value.decode(), "driver_api": version.value, "sms": self.sms,
            "l2_bytes": self.l2_bytes, "max_clock_khz": self.attribute(CLOCK),
            "capability": self.capability,
        }  # fmt: skip

    # -- memory -----------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        address = c_uint64()
        self.call("cuMemAlloc_v2", byref(address), c_size_t(nbytes))
        return address.value

    def free(self, address: int) -> None:
        self.call("cuMemFree_v2", c_uint64(address))

    def fill(self, address: int, nbytes: int, value: int = 0) -> None:
        """Fill memory in 32-bit words, in stream order."""
        words = c_size_t(nbytes // 4)
        self.call("cuMemsetD32Async", c_uint64(address), c_uint(value), words, self.stream)

    def download(self, address: int, shape: Sequence[int]) -> np.ndarray:
        """uint64, after all that the stream has."""
        self.synchronize()
        out = np.empty(shape, np.uint64)
        self.call("cuMemcpyDtoH_v2", c_void_p(out.ctypes.data), c_uint64(address),
                  c_size_t(out.nbytes))  # fmt: skip
        return out

    def synchronize(self) -> None:
        self.call("cuStreamSynchronize", self.stream)

    # -- kernels ----------------------------------------------------------------------------------

    def load(self, text: str, smem: int, cluster: int) -> tuple[c_void_p, c_void_p]:
        """(module, its kernel `bench`), which may have so much shared memory."""
        log = ctypes.create_string_buffer(LOG_BYTES)
        options = (c_int * 2)(ERROR_LOG, ERROR_LOG_BYTES)
        values = (c_void_p * 2)(ctypes.addressof(log), LOG_BYTES)
        module, kernel = c_void_p(), c_void_p()
        try:
            self.call(
                "cuModuleLoadDataEx", byref(module), text.encode() + b"\0", 2, options, values
            )
        except DriverError as error:
            said = log.value.decode(errors="replace").strip().partition("\n")[0]
            raise DriverError(f"{error}: {said}") from None
        self.call("cuModuleGetFunction", byref(kernel), module, b"bench")
        if smem:
            self.call("cuFuncSetAttribute", kernel, SHARED_SIZE, smem)
        if cluster > 8:
            self.call("cuFuncSetAttribute", kernel, NON_PORTABLE, 1)
        return module, kernel

    def unload(self, module: c_void_p) -> None:
        self.call("cuModuleUnload", module)

    def launch(
        self, kernel: c_void_p, grid: int, block: int, params: Sequence[bytes], *,
        smem: int = 0, cluster: int = 1, overlapped: bool = False,
    ) -> None:  # fmt: skip
        """On the stream. overlapped: it may begin before the kernel in front has ended."""
        attributes = (_Attribute * 2)()
        count = 0
        if cluster > 1:
            attributes[count].id = CLUSTER
            for axis, size in enumerate((cluster, 1, 1)):
                attributes[count].value[axis] = size
            count += 1
        if overlapped:
            attributes[count].id = SERIALISED
            attributes[count].value[0] = 1
            count += 1
        config = _Config(grid, 1, 1, block, 1, 1, smem, self.stream, attributes, count)
        held = [_aligned(raw) for raw in params]
        pointers = (c_void_p * max(len(held), 1))(*(address for _, address in held))
        self.call("cuLaunchKernelEx", byref(config), kernel, pointers, None)

    def tensor_map(self, address: int, nbytes: int, shape: Map) -> bytes:
        """The 128 bytes that cuTensorMapEncodeTiled makes of a buffer."""
        raw = ctypes.create_string_buffer(128 + 64)
        at = -ctypes.addressof(raw) % 64
        rows = nbytes // shape.pitch
        self.call(
            "cuTensorMapEncodeTiled", c_void_p(ctypes.addressof(raw) + at), U8, 2,
            c_void_p(address), (c_uint64 * 2)(shape.pitch, rows), (c_uint64 * 1)(shape.pitch),
            (c_uint32 * 2)(shape.width, shape.height), (c_uint32 * 2)(1, 1), NO_INTERLEAVE,
            SWIZZLES[shape.swizzle], PROMOTE_NONE, ZEROS,
        )  # fmt: skip
        return raw.raw[at : at + 128]

    # -- time -------------------------------------------------------------------------------------

    @cached_property
    def _busy(self) -> c_void_p:
        return self.load(head(self.arch) + BUSY, 0, 1)[1]

    def seconds(self, work: Callable[[], object]) -> float:
        """Between events around what `work` enqueues, while the GPU is busy with something else."""
        begin, end, took = c_void_p(), c_void_p(), c_float()
        for event in (begin, end):
            self.call("cuEventCreate", byref(event), 0)
        self.launch(self._busy, 1, 1, [HEAD_START.to_bytes(8, "little")])
        self.call("cuEventRecord", begin, self.stream)
        work()
        self.call("cuEventRecord", end, self.stream)
        self.call("cuEventSynchronize", end)
        self.call("cuEventElapsedTime", byref(took), begin, end)
        for event in (begin, end):
            self.call("cuEventDestroy_v2", event)
        return took.value * 1e-3

    def graph(self, work: Callable[[], object]) -> Callable[[], None]:
        """Capture what `work` enqueues; the returned call replays it."""
        graph, ready = c_void_p(), c_void_p()
        self.call("cuStreamBeginCapture_v2", self.stream, 2)
        work()
        self.call("cuStreamEndCapture", self.stream, byref(graph))
        self.call("cuGraphInstantiateWithFlags", byref(ready), graph, c_uint64(0))
        return lambda: self.call("cuGraphLaunch", ready, self.stream)


def _aligned(raw: bytes) -> tuple[object, int]:
    """(what owns the memory, the address): a parameter at 64 bytes."""
    buffer = ctypes.create_string_buffer(len(raw) + 64)
    address = ctypes.addressof(buffer) + -ctypes.addressof(buffer) % 64
    ctypes.memmove(address, raw, len(raw))
    return buffer, address
