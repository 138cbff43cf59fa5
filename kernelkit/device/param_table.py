"""A kernel's parameters as one table of int64 words: packed by name, read by name.

A kernel declares its parameters once, as a frozen dataclass whose fields are `Word`s or dataclasses
of the same kind. The host packs an instance (`ParamTable.of`), the kernel gets one back
(`DeviceTable.unpack`), and the arguments with which it is compiled follow from the class
(`ParamTable.zeros`), so that host and device cannot disagree about a position. Declare such classes
with `kw_only=True`, in a file that does not import cutlass.

The table is one parameter passed by value and read where it lies (`__grid_constant__`), in constant
memory: no copy to the device, and a CUDA graph captures it with the launch. It may also carry what
varies in number from launch to launch, such as a list of tensors, as rows indexed at run time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from kernelkit.device.param_words import Word, word_names

if TYPE_CHECKING:
    import torch

# CUDA C++ Programming Guide, "Kernel parameters": compute capability 7.0 and above, CUDA 12.1.
MAX_PARAMETER_BYTES = 32_764


class ParamTable:
    """Host side, an argument of a compiled function: `rows` (at most `capacity`) of equal width.

    A word is a number, or a tensor or (tensor, offset in bytes) for its address. numbers: all
    words. addresses: (place among the words, tensor, offset) of those that are addresses.
    """

    def __init__(self, rows: Sequence[Sequence[Word]], capacity: int) -> None:
        self._shape = (capacity, len(rows[0]))
        size = math.prod(self._shape)
        if size * 8 > MAX_PARAMETER_BYTES:
            raise ValueError(
                f"a table of {self._shape} numbers has {size * 8} bytes, "
                f"limit {MAX_PARAMETER_BYTES} for all parameters of a kernel"
            )
        self.numbers: list[int] = []
        self.addresses: list[tuple[int, torch.Tensor, int]] = []
        for place, word in enumerate(chain.from_iterable(rows)):
            if not isinstance(word, int):
                tensor, offset = word if isinstance(word, tuple) else (word, 0)
                self.addresses.append((place, tensor, offset))
                word = tensor.data_ptr() + offset
            self.numbers.append(word)
        self.numbers += [0] * (size - len(self.numbers))

    @classmethod
    def of(cls, params: Any) -> ParamTable:
        """The words of an instance of a dataclass of parameters."""
        return cls([[attrgetter(name)(params) for name in word_names(params.__class__)]], 1)

    @classmethod
    def zeros(cls, kind: type) -> ParamTable:
        """A table with which a kernel is compiled that takes a dataclass of parameters."""
        return cls([[0] * len(word_names(kind))], 1)

    def __get_mlir_types__(self) -> list[Any]:
        ir = import_module("cutlass._mlir.ir")  # which has no type information
        return [ir.Type.parse(f"!llvm.array<{len(self.numbers)} x i64>")]

    def __new_from_mlir_values__(self, values: list[Any]) -> Any:
        from kernelkit.device.device_table import DeviceTable

        return DeviceTable(values[0], self._shape)
