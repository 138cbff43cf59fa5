"""CPU tensors presented as CUDA device memory, which DSL host code requires.

The DSL compiles a tensor argument to a generic or a global-memory pointer, by the device type in
its DLPack struct. It refuses TMA and many copies on generic pointers. tvm-ffi host code checks the
type at each call. The struct therefore contains CUDA, while its pointer is a host address.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ptxemu.host.allocations import LIVE
from ptxemu.host.patching import patched

_CPU = 1  # kDLCPU
_CUDA = 2  # kDLCUDA

# Byte offset of DLTensor.device.device_type (at +8 in a DLTensor) in what a capsule points to, by
# the capsule's name: the versioned struct starts with version, context, deleter and flags.
_DEVICE_TYPE = {b"dltensor": 8, b"dltensor_versioned": 32 + 8}
_FFI_DEVICE_TYPE = 24 + 8  # a tvm-ffi tensor object has a header of 24 bytes before its DLTensor


class DeviceView:
    """A DLPack producer that exports the memory of a CPU tensor as CUDA device 0."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor.detach() if hasattr(tensor, "detach") else tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_CUDA, 0)

    def __dlpack__(self, *, stream: int | None = None, **keywords: Any) -> Any:
        """A capsule as the tensor itself makes it; `stream` has no meaning on a CPU."""
        capsule = self._tensor.__dlpack__(**keywords)
        _device_type(capsule).value = _CUDA
        return capsule


def as_device(value: Any) -> Any:
    """`value` with its CPU tensors, also those in tuples and lists, presented as device memory."""
    if isinstance(value, tuple | list):
        items = [as_device(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if hasattr(type(value), "__tvm_ffi_object__") and not hasattr(value, "__chandle__"):
        value = value.__tvm_ffi_object__()
    return DeviceView(value) if _is_cpu_tensor(value) else value


@contextmanager
def cpu_as_device() -> Iterator[None]:
    """While active, every DSL tensor made of CPU memory presents it as device memory."""
    import cutlass.cute.runtime as runtime

    original = runtime._Tensor.__init__

    def construct(self: Any, tensor: Any, *args: Any, **kwargs: Any) -> None:
        LIVE.note([tensor])  # the DSL keeps its memory, but nothing that shows it
        original(self, DeviceView(tensor) if _is_cpu_tensor(tensor) else tensor, *args, **kwargs)

    with patched(runtime._Tensor, {"__init__": construct}):
        yield


@contextmanager
def presented(values: Iterable[Any]) -> Iterator[None]:
    """Within the block, present DSL tensors among `values`, made from CPU memory, as CUDA."""
    with ExitStack() as stack:
        for value in values:
            for device_type in _device_types_of(value):
                if device_type.value == _CPU:
                    stack.callback(setattr, device_type, "value", _CPU)
                    device_type.value = _CUDA
        yield


def _device_types_of(value: Any) -> Iterator[ctypes.c_int32]:
    """Yield the device types of a tensor of `from_dlpack`: in its capsule and tvm-ffi tensor."""
    fields = getattr(value, "__dict__", {})
    if "_dlpack_data" in fields:
        yield _device_type(fields["_dlpack_data"])
    if "_tvm_ffi_tensor" in fields:
        handle = int(fields["_tvm_ffi_tensor"].__chandle__())
        yield ctypes.c_int32.from_address(handle + _FFI_DEVICE_TYPE)


def _is_cpu_tensor(value: Any) -> bool:
    """Whether `value` exports CPU memory by DLPack (numpy, torch, tvm-ffi)."""
    if not (hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__")):
        return False
    return int(value.__dlpack_device__()[0]) == _CPU


def _device_type(capsule: Any) -> ctypes.c_int32:
    api = ctypes.pythonapi
    name_of = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(("PyCapsule_GetName", api))
    pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", api)
    )
    name = name_of(capsule)
    return ctypes.c_int32.from_address(pointer_of(capsule, name) + _DEVICE_TYPE[name])
