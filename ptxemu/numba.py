"""Numba-CUDA kernels without a GPU: compiled to PTX by Numba, launched on arrays."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ptxemu.arguments.array import Array, array_of, packed
from ptxemu.host.numba_lowering import Argument, lowered
from ptxemu.module import Module, load
from ptxemu.report import LaunchReport

_ARCH = re.compile(r"(?:sm|compute)_(\d+)(\d)[af]?")
_SAME = {"bool": "boolean"}  # element types of numpy that Numba calls differently


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel.

    module: its PTX.
    arguments: those of the Python function.
    """

    module: Module
    arguments: Sequence[Argument]

    def launch(self, *args: Any, grid: Any, block: Any, **how: Any) -> LaunchReport:
        """Launch the kernel.

        Args:
            args: Arguments of the Python function: arrays of any library in CPU memory, numbers.
            grid: Blocks, as in `kernel[grid, block]`.
            block: Threads of a block.
            how: More keywords of `ptxemu.Module.launch`, such as `options`.

        Raises TypeError or ValueError for an argument that the signature does not allow, and the
        errors of `ptxemu.Module.launch`.
        """
        if len(args) != len(self.arguments):
            signature = ", ".join(each.text for each in self.arguments)
            raise TypeError(f"{len(args)} arguments given; the kernel takes ({signature})")
        words: list[Any] = []
        for number, (wanted, value) in enumerate(zip(self.arguments, args, strict=True)):
            if wanted.ndim is None:
                words.append(value)
            else:
                words += _words(number, wanted, value)
        return self.module.launch(grid=grid, block=block, args=words, **how)


def compile(
    function: Any, signature: Any, arch: str = "sm_90", *, lineinfo: bool = True, **options: Any
) -> Kernel:
    """Compile a kernel for a signature.

    Args:
        function: A Python function, or one with `numba.cuda.jit`.
        signature: Types of the arguments, as `(float32[::1], float32)` or "void(float32[::1])".
        arch: Target, such as "sm_80" or "sm_90a"; Numba targets it without the letter.
        lineinfo: Whether reports name lines of Python.
        options: More keywords of `numba.cuda.compile_ptx`, such as `fastmath=True`.

    Raises ModuleNotFoundError where numba-cuda is not installed, and the errors of Numba.
    """
    found = _ARCH.fullmatch(arch)
    if not found:
        raise ValueError(f"arch={arch!r}; must be like 'sm_90'")
    capability = int(found[1]), int(found[2])
    ptx, arguments = lowered(function, signature, capability, {"lineinfo": lineinfo, **options})
    return Kernel(load(ptx), arguments)


def _words(number: int, wanted: Argument, value: Any) -> list[Any]:
    """The parameters of an array: two null pointers, sizes, the address, shape and strides."""
    array = array_of(value)
    if array is None:
        raise TypeError(f"argument {number} wants {wanted.text}; given a {type(value).__name__}")
    dtype = _SAME.get(array.dtype, array.dtype)
    if len(array.shape) != wanted.ndim or dtype != wanted.dtype or not _fits(array, wanted.layout):
        raise ValueError(
            f"argument {number} wants {wanted.text}; given {array} with strides {array.strides}"
        )
    count = prod(array.shape)
    return [None, None, count, array.itemsize, value, *array.shape, *array.strides]


def _fits(array: Array, layout: str) -> bool:
    """Whether an array has the layout; strides of dimensions with one element do not matter."""
    if layout == "A" or 0 in array.shape:
        return True
    order = array.shape if layout == "C" else array.shape[::-1]
    strides = array.strides if layout == "C" else array.strides[::-1]
    needed = packed(order, array.itemsize)
    return all(n == 1 or a == b for n, a, b in zip(order, strides, needed, strict=True))
