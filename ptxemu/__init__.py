"""ptxemu: NVIDIA PTX for sm_100a, executed on a CPU.

There are three entry points. `load(text).launch(args=[...])` runs PTX on arrays.
`compile(fn, *args)` and `run(compiled, *args)` run CuTe DSL kernels through their own host code.
`python -m ptxemu script.py` runs a whole script.

ptxemu needs numpy; the last two need the DSL and torch as well. README.md links to pages on the
memory model, its gaps, and the rules for imports. State that outlives a launch belongs to a context
(`contextvars`) or is a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ptxemu.errors import (
    Deadlock,
    HardwareRefusal,
    LimitExceeded,
    OutOfBounds,
    PtxEmuError,
    PtxSyntaxError,
    UnsupportedPtx,
)
from ptxemu.findings import Access, Finding
from ptxemu.options import Options
from ptxemu.report import LaunchReport, Report

if TYPE_CHECKING:
    from ptxemu import numba, nvrtc, tilelang, triton
    from ptxemu.arguments.tensor_map import tensor_map
    from ptxemu.module import Module, load
    from ptxemu.version import __version__

_HOME_OF = {
    "Module": "ptxemu.module",
    "load": "ptxemu.module",
    "tensor_map": "ptxemu.arguments.tensor_map",
    "__version__": "ptxemu.version",
}
_FRONT_ENDS = ("numba", "nvrtc", "tilelang", "triton")  # modules that are imported on first use


def compile(fn: object, *args: object, options: str = "", **kwargs: object) -> object:
    """`cute.compile` without a GPU: for sm_100a, PTX kept, CPU tensors as device memory."""
    from ptxemu.host import cutedsl

    return cutedsl.compile(fn, *args, options=options, **kwargs)


def run(
    compiled: object, *args: object, options: Options | None = None, **kwargs: object
) -> Report:
    """Execute every launch of a compiled function on CPU memory.

    Args:
        compiled: Result of `cute.compile`, plain or compiled with --enable-tvm-ffi.
        args: Its runtime arguments.

    Raises the errors of `ptxemu.errors`, and ValueError for an object without PTX.
    """
    from ptxemu.host import cutedsl
    from ptxemu.host.allocations import LIVE, unseen
    from ptxemu.host.emulator import Emulator

    values = [*args, *kwargs.values()]
    LIVE.note(values)
    emulator = Emulator(options, whole_process=any(map(unseen, values)))
    cutedsl.run(compiled, *args, launcher=emulator, **kwargs)
    return emulator.report


def run_host(code: object, pointers: Sequence[int], options: Options | None = None) -> Report:
    """Execute every launch of a host function that the DSL compiled earlier, on CPU memory.

    Args:
        code: A `ptxemu.host.engine.HostCode`, for example from an artefact.
        pointers: Addresses of its arguments.

    Needs no DSL. Raises the errors of `ptxemu.errors`.
    """
    from ptxemu.host.emulator import Emulator
    from ptxemu.host.engine import host_program
    from ptxemu.host.patching import pretended

    launcher = pretended.get() if options is None else None
    emulator = launcher if isinstance(launcher, Emulator) else Emulator(options)
    host_program(code).call(pointers, emulator)
    return emulator.report


def pretends() -> bool:
    """Whether this process is run as if it had a GPU, by `python -m ptxemu`: native launches of
    host code that the DSL does not launch are to come to `run_host`."""
    from ptxemu.host.patching import pretended

    return pretended.get() is not None


if not TYPE_CHECKING:  # to type checkers a name that is not there is an error

    def __getattr__(name: str) -> Any:
        """Import `Module` and `load`, which need numpy and every instruction, on first use.

        Options and reports thus remain cheap to import.
        """
        if name in _FRONT_ENDS:
            return import_module(f"ptxemu.{name}")
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_HOME_OF[name]), name)
        return value


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
    "__version__",
    "compile",
    "load",
    "numba",
    "nvrtc",
    "pretends",
    "run",
    "run_host",
    "tensor_map",
    "tilelang",
    "triton",
]
