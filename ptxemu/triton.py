"""Launch Triton kernels on CPU arrays, from a program that does not run under `python -m ptxemu`.

It needs Triton, which is imported when a kernel is launched. See docs/ptxemu/triton.md.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np

from ptxemu.host import gpus
from ptxemu.host.allocations import LIVE
from ptxemu.host.emulator import Emulator
from ptxemu.host.patching import patched
from ptxemu.options import Options
from ptxemu.report import Report

_NEEDED = (
    "ptxemu.triton.launch needs Triton, which is not installed: `pip install triton` "
    "(its compiler needs no GPU)"
)


def launch(
    fn: Any,
    grid: Any,
    *args: Any,
    check: bool = False,
    gpu: str | None = None,
    ptxemu_options: Options | None = None,
    **named: Any,
) -> Report:
    """Compile a kernel of Triton and execute it on CPU memory, as `fn[grid](*args, **named)`.

    Args:
        fn: A function with `@triton.jit`, also with `@triton.autotune` or `@triton.heuristics`; a
            kernel of Gluon.
        grid: One to three numbers of programs, or a function of the constants that returns them.
        args: Arrays of numpy, which must be contiguous; tensors of torch on the CPU; tensor
            descriptors; numbers.
        check: Whether the checker runs; its findings are in the report.
        gpu: GPU to compile for, a name of `python -m ptxemu --help`; by default that of
            CUTE_DSL_ARCH, else a B200.
        ptxemu_options: Further options of the launches.
        named: Further arguments and constants of the kernel, and options of Triton's compiler such
            as `num_warps`.

    Returns:
        A report with one launch, or none for an empty grid.

    Raises:
        ModuleNotFoundError: Triton is not installed.
        ValueError: The GPU is unknown or contradicts CUTE_DSL_ARCH; an array is not contiguous.
        ptxemu.PtxEmuError: Its subclasses, for what a GPU would refuse or ptxemu does not execute.
    """
    with emulated(gpu, check=check, ptxemu_options=ptxemu_options) as report:
        fn[grid](*map(_given, args), **{name: _given(each) for name, each in named.items()})
    return report


@contextmanager
def emulated(
    gpu: str | None = None, *, check: bool = False, ptxemu_options: Options | None = None
) -> Iterator[Report]:
    """Within the block, emulate every launch of a Triton kernel, and add it to the report.

    Kernels get tensors of torch on the CPU; memory that a kernel asks for (`triton.set_allocator`)
    is provided. For the arguments see `launch`.
    """
    if importlib.util.find_spec("triton") is None:
        raise ModuleNotFoundError(_NEEDED, name="triton")
    from ptxemu.host.triton_driver import triton_without_gpu

    chosen = gpus.chosen(gpus.named(gpu) if gpu else None, os.environ)
    options = ptxemu_options or Options()
    emulator = Emulator(replace(options, check=True) if check else options, told=True)
    with ExitStack() as stack:
        stack.enter_context(gpus.seeming(chosen))
        stack.enter_context(triton_without_gpu(emulator))
        stack.enter_context(_allocator())
        yield emulator.report


@contextmanager
def _allocator() -> Iterator[None]:
    """Within the block, memory that kernels ask for is given, unless the user set an allocator."""
    allocation: Any = import_module("triton.runtime._allocation")
    given = {"__call__": lambda _, size, alignment, stream: _new(size, alignment)}
    with patched(allocation.NullAllocator, given):
        yield


def _new(nbytes: int, alignment: int) -> _Array:
    memory = np.zeros(nbytes + alignment, np.uint8)
    start = -memory.ctypes.data % alignment
    return _Array(memory[start : start + nbytes])


def _given(value: Any) -> Any:
    """An argument as Triton takes it; its memory is then known to the emulator."""
    if isinstance(value, np.ndarray):
        return _Array(value)
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return type(value)(map(_given, value))
    LIVE.note([value, getattr(value, "base", None)])
    return value


class _Array:
    """A numpy array with the attributes that Triton looks at."""

    def __init__(self, array: np.ndarray) -> None:
        if not array.flags.c_contiguous:
            raise ValueError(f"an array of shape {array.shape} that is not contiguous")
        LIVE.note([array])
        self.array = array
        self.dtype = array.dtype
        self.shape: Sequence[int] = array.shape

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def stride(self, dimension: int | None = None) -> Any:
        """Return the strides in elements, as a tensor of torch does."""
        strides = tuple(each // self.array.itemsize for each in self.array.strides)
        return strides if dimension is None else strides[dimension]
