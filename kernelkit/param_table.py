"""A table of int64 numbers inside the kernel's parameters, indexed at run time.

It carries what varies in number from launch to launch, such as the addresses and strides of a list
of tensors, without a copy to the device: a CUDA graph captures it with the launch. The table is one
parameter passed by value and read where it lies (`__grid_constant__`), in constant memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

# CUDA C++ Programming Guide, "Kernel parameters": compute capability 7.0 and above, CUDA 12.1.
MAX_PARAMETER_BYTES = 32_764


class ParamTable:
    """Host side, an argument of a compiled function: `rows` (at most `capacity`) of equal width."""

    def __init__(self, rows: Sequence[Sequence[int]], capacity: int) -> None:
        self._shape = (capacity, len(rows[0]))
        size = math.prod(self._shape)
        if size * 8 > MAX_PARAMETER_BYTES:
            raise ValueError(
                f"a table of {self._shape} numbers has {size * 8} bytes, "
                f"limit {MAX_PARAMETER_BYTES} for all parameters of a kernel"
            )
        numbers = list(chain.from_iterable(rows))
        self.numbers = numbers + [0] * (size - len(numbers))

    def __get_mlir_types__(self) -> list[Any]:
        from cutlass._mlir import ir

        return [ir.Type.parse(f"!llvm.array<{len(self.numbers)} x i64>")]

    def __new_from_mlir_values__(self, values: list[Any]) -> Any:
        from kernelkit.device_table import DeviceTable

        return DeviceTable(values[0], self._shape)


def table_of(numbers: Sequence[int]) -> ParamTable:
    """What a kernel takes whose only argument but the grid are these numbers."""
    return ParamTable([numbers], 1)
