"""A table of int64 numbers inside the kernel's parameters, indexed at run time.

It carries what varies in number from launch to launch, such as the addresses and strides of a list
of tensors, without a copy to the device: a CUDA graph captures it with the launch. The table is one
parameter passed by value and read where it lies (`__grid_constant__`), in constant memory.
"""

import ctypes
import math
from collections.abc import Sequence
from itertools import chain

import cutlass.cute as cute
from cutlass import AddressSpace, Int64
from cutlass._mlir import ir
from cutlass._mlir.dialects import cute as cute_ir
from cutlass._mlir.dialects import cute_nvgpu

# CUDA C++ Programming Guide, "Kernel parameters": compute capability 7.0 and above, CUDA 12.1.
MAX_PARAMETER_BYTES = 32_764


class ParamTable:
    """Host side, an argument of a compiled function: `rows` (at most `capacity`) of equal width."""

    def __init__(self, rows: Sequence[Sequence[int]], capacity: int) -> None:
        self._shape = (capacity, len(rows[0]))
        self._numbers = (ctypes.c_int64 * math.prod(self._shape))(*chain.from_iterable(rows))
        if ctypes.sizeof(self._numbers) > MAX_PARAMETER_BYTES:
            raise ValueError(
                f"a table of {self._shape} numbers has {ctypes.sizeof(self._numbers)} bytes, "
                f"limit {MAX_PARAMETER_BYTES} for all parameters of a kernel"
            )

    def __c_pointers__(self) -> list[int]:
        return [ctypes.addressof(self._numbers)]

    def __get_mlir_types__(self) -> list[ir.Type]:
        return [ir.Type.parse(f"!llvm.array<{len(self._numbers)} x i64>")]

    def __new_from_mlir_values__(self, values: list[ir.Value]) -> "DeviceTable":
        return DeviceTable(values[0], self._shape)


class DeviceTable:
    """The table in traced code: pass it on to the kernel, which calls `read` once."""

    def __init__(self, value: ir.Value, shape: tuple[int, int]) -> None:
        self._value = value
        self._shape = shape

    def read(self) -> cute.Tensor:
        """int64 (capacity, width), row-major, in the parameters of the running kernel."""
        # Only the operation's address is of use: the DSL has no name for the array as a pointee.
        pointer = cute_nvgpu.GetGridConstantPointerOp(input=self._value).operation
        address = Int64(cute_ir.ptrtoint(Int64.mlir_type, pointer))
        numbers = cute.make_ptr(Int64, address, AddressSpace.generic, assumed_align=8)
        return cute.make_tensor(numbers, cute.make_layout(self._shape, stride=(self._shape[1], 1)))

    def __extract_mlir_values__(self) -> list[ir.Value]:
        return [self._value]

    def __extract_mlir_attributes__(self) -> list[ir.DictAttr]:
        return [ir.DictAttr.get({"cute_nvgpu.grid_constant": ir.UnitAttr.get()})]

    def __new_from_mlir_values__(self, values: list[ir.Value]) -> "DeviceTable":
        return DeviceTable(values[0], self._shape)
