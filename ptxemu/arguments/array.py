"""Arrays of other libraries by their address, shape, strides and element type.

numpy arrays and torch tensors are read directly, others through `__cuda_array_interface__`,
`__dlpack__` or `__array_interface__`. None of these libraries is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ptxemu.arguments import dlpack
from ptxemu.machine.memory import process_ranges


@dataclass(frozen=True)
class Array:
    """An array in the memory of this process.

    address: of its first element, the one with index 0 in every dimension.
    shape: elements, as its library gives them.
    strides: bytes, one for each dimension; may be 0 or negative.
    dtype: name of the element type as numpy or torch spells it, such as "float32" or "bfloat16".
    itemsize: bytes of an element.
    writable: whether a kernel may write it.
    keep: object that owns the memory.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int
    writable: bool = True
    keep: Any = field(default=None, repr=False, compare=False)

    @property
    def extent(self) -> tuple[int, int]:
        """First address, and the one behind the last byte; both are 0 for an empty array."""
        if 0 in self.shape:
            return 0, 0
        steps = [(n - 1) * step for n, step in zip(self.shape, self.strides, strict=True)]
        low = self.address + sum(min(step, 0) for step in steps)
        return low, self.address + sum(max(step, 0) for step in steps) + self.itemsize

    def __str__(self) -> str:
        """ "float32 (64, 128)"."""
        return f"{self.dtype} {self.shape}"


def array_of(value: Any) -> Array | None:
    """Describe an array; None for anything else, scalars of numpy included.

    Raises ValueError if the memory of the array is not readable here, as that of a real GPU is not.
    """
    if isinstance(value, np.generic | bytes | bytearray | memoryview | type):
        return None
    if isinstance(value, np.ndarray):
        return _of_numpy(value)
    if callable(getattr(value, "data_ptr", None)) and callable(getattr(value, "stride", None)):
        return _of_torch(value)
    interface = getattr(value, "__cuda_array_interface__", None)
    if isinstance(interface, Mapping):
        return _readable(_of_interface(value, interface), value)
    if callable(getattr(value, "__dlpack__", None)):
        return _readable(_of_dlpack(value), value)
    interface = getattr(value, "__array_interface__", None)
    if isinstance(interface, Mapping):
        return _of_interface(value, interface)
    return None


def as_bytes(low: int, high: int, *, writable: bool) -> np.ndarray:
    """Return the memory [low, high) as a numpy array of bytes; it keeps nothing alive."""
    view: np.ndarray = np.asarray(_Bytes(low, high, writable))
    return view


class _Bytes:
    """What numpy needs to know of a stretch of memory."""

    def __init__(self, low: int, high: int, writable: bool) -> None:
        self.__array_interface__ = {
            "data": (low, not writable),
            "shape": (high - low,),
            "typestr": "|u1",
            "version": 3,
        }


def _of_numpy(array: np.ndarray) -> Array:
    return Array(
        array.ctypes.data,
        array.shape,
        array.strides,
        array.dtype.name,
        array.itemsize,
        array.flags.writeable,
        array,
    )


def _of_torch(tensor: Any) -> Array:
    """A tensor that claims to be on a GPU is in CPU memory under `python -m ptxemu`."""
    size = int(tensor.element_size())
    found = Array(
        int(tensor.data_ptr()),
        tuple(tensor.shape),
        tuple(size * step for step in tensor.stride()),
        str(tensor.dtype).removeprefix("torch."),
        size,
        True,
        tensor,
    )
    on_cpu = getattr(getattr(tensor, "device", None), "type", "cpu") == "cpu"
    return found if on_cpu else _readable(found, tensor)


def _of_interface(value: Any, interface: Mapping[str, Any]) -> Array:
    dtype = np.dtype(interface["typestr"])
    shape = tuple(interface["shape"])
    strides = interface.get("strides") or packed(shape, dtype.itemsize)
    data = interface.get("data")
    if data is None:
        raise ValueError(f"{type(value).__name__} exports a buffer without an address")
    return Array(data[0], shape, tuple(strides), dtype.name, dtype.itemsize, not data[1], value)


def _of_dlpack(value: Any) -> Array:
    found = dlpack.tensor_of(value)
    strides = found.strides or packed(found.shape, 1)
    steps = tuple(found.itemsize * step for step in strides)
    return Array(
        found.address, found.shape, steps, found.dtype, found.itemsize, found.writable, found
    )


def packed(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Strides of an array whose last dimension is contiguous, without gaps."""
    strides, step = [], itemsize
    for side in reversed(shape):
        strides.append(step)
        step *= side
    return tuple(reversed(strides))


def _readable(array: Array, value: Any) -> Array:
    low, high = array.extent
    at = low
    for start, end, _ in sorted(process_ranges()):
        if start <= at < end:
            at = end
    if at < high:
        raise ValueError(
            f"{type(value).__name__} of {array} is at {low:#x}, which this process cannot read;"
            " copy it to the CPU first"
        )
    return array
