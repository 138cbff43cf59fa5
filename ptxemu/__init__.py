"""ptxemu: NVIDIA PTX for sm_100a, executed on a CPU.

Three doors: `load(text).launch(...)` runs PTX; `compile(fn, *args)` and `run(compiled, *args)` do
the same for CuTe DSL kernels through their own host code; `python -m ptxemu script.py` runs a whole
script. Needs numpy; the DSL and torch only for the last two. See README.md for the memory model and
its gaps.
"""

from __future__ import annotations

from ptxemu.errors import (
    Deadlock,
    HardwareRefusal,
    LimitExceeded,
    OutOfBounds,
    PtxEmuError,
    PtxSyntaxError,
    UnsupportedPtx,
)
from ptxemu.module import Module, load
from ptxemu.options import Options
from ptxemu.report import Access, Finding, LaunchReport, Report


def compile(fn: object, *args: object, options: str = "", **kwargs: object) -> object:
    """`cute.compile` without a GPU: for sm_100a, PTX kept, CPU tensors as device memory."""
    from ptxemu.host import cutedsl

    return cutedsl.compile(fn, *args, options=options, **kwargs)


def run(
    compiled: object, *args: object, options: Options | None = None, **kwargs: object
) -> Report:
    """Execute every launch of what `cute.compile` returned, on CPU memory.

    compiled: plain, or compiled with --enable-tvm-ffi. args: its runtime arguments. Raises the
    errors of `ptxemu.errors`, and ValueError for an object without PTX.
    """
    from ptxemu.host import cutedsl
    from ptxemu.host.emulator import Emulator

    emulator = Emulator(options)
    cutedsl.run(compiled, *args, launcher=emulator, **kwargs)
    return emulator.report


__all__ = [
    "Access",
    "Deadlock",
    "Finding",
    "HardwareRefusal",
    "LaunchReport",
    "LimitExceeded",
    "Module",
    "Options",
    "OutOfBounds",
    "PtxEmuError",
    "PtxSyntaxError",
    "Report",
    "UnsupportedPtx",
    "compile",
    "load",
    "run",
]
