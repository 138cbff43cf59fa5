"""A tensor in host memory, of torch or numpy, by its address, shape, strides and element type."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from ptxemu.numerics.formats import ELEMENTS

_NAMES = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
    "float8_e8m0fnu": "ue8m0",
    "bool": "u8",
}


class HostTensor:
    """View of a tensor that can read and restore its bits; torch is not imported.

    tensor: a torch tensor on the CPU (or presented as on a device), or a numpy array. `dtype` is a
    key of `layouts.ELEMENTS`. `strides` are in bytes. Raises ValueError for other element types.
    """

    def __init__(self, tensor: Any) -> None:
        self._keep = tensor
        self.shape: tuple[int, ...] = tuple(tensor.shape)
        name = str(tensor.dtype).removeprefix("torch.")
        self.dtype = _NAMES.get(name, name.replace("uint", "u").replace("int", "s"))
        if self.dtype not in ELEMENTS:
            raise ValueError(f"a tensor of {tensor.dtype}; supported are {', '.join(ELEMENTS)}")
        size = ELEMENTS[self.dtype][0]
        if isinstance(tensor, np.ndarray):
            self.address = tensor.ctypes.data
            self.strides = tensor.strides
        else:
            self.address = int(tensor.data_ptr())
            self.strides = tuple(size * step for step in tensor.stride())
        if any(step < 0 for step in self.strides):
            raise ValueError("a tensor with negative strides is not supported")

    @property
    def extent(self) -> int:
        """Bytes from the first element to the end of the last."""
        if 0 in self.shape:
            return 0
        steps = zip(self.shape, self.strides, strict=True)
        return sum((side - 1) * step for side, step in steps) + ELEMENTS[self.dtype][0]

    @property
    def bits(self) -> np.ndarray:
        """Memory of the tensor as unsigned elements; writes change the tensor."""
        space: Any = (ctypes.c_uint8 * max(self.extent, 1)).from_address(self.address)
        kind = f"u{ELEMENTS[self.dtype][0]}"
        return np.ndarray(self.shape, kind, buffer=space, strides=self.strides)

    def values(self, bits: np.ndarray) -> np.ndarray:
        """Bits as values that numpy has."""
        return ELEMENTS[self.dtype][1](np.ascontiguousarray(bits))

    def address_of(self, index: tuple[int, ...]) -> int:
        """Return the address of an element."""
        return self.address + sum(i * step for i, step in zip(index, self.strides, strict=True))
