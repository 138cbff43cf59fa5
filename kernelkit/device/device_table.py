"""`ParamTable` in traced code: int64 numbers in the parameters of the running kernel.

One parameter passed by value and read where it lies (`__grid_constant__`), in constant memory.
"""

from collections.abc import Iterator
from typing import TypeVar

import cutlass.cute as cute
from cutlass import AddressSpace, Int64
from cutlass._mlir import ir
from cutlass._mlir.dialects import cute as cute_ir
from cutlass._mlir.dialects import cute_nvgpu

from kernelkit.device.param_words import members, word_names

Params = TypeVar("Params")


class DeviceTable:
    """The table in traced code: pass it on to the kernel, which calls `unpack` or `read` once."""

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

    def unpack(self, kind: type[Params]) -> Params:
        """The instance that the host packed, with an Int64 for every word."""
        count = len(word_names(kind))
        if self._shape != (1, count):
            raise TypeError(f"{kind.__name__} has {count} words, the table has shape {self._shape}")
        words = self.read()
        return _built(kind, iter([words[0, index] for index in range(count)]))

    def __extract_mlir_values__(self) -> list[ir.Value]:
        return [self._value]

    def __extract_mlir_attributes__(self) -> list[ir.DictAttr]:
        return [ir.DictAttr.get({"cute_nvgpu.grid_constant": ir.UnitAttr.get()})]

    def __new_from_mlir_values__(self, values: list[ir.Value]) -> "DeviceTable":
        return DeviceTable(values[0], self._shape)


def _built(kind: type[Params], words: Iterator[Int64]) -> Params:
    """An instance of `kind` out of its words, in the order of `param_words.word_names`."""
    return kind(
        **{name: _built(nested, words) if nested else next(words) for name, nested in members(kind)}
    )
