"""CuTe DSL functions without a GPU: compile for sm_100a, and run the host code into a launcher."""

from __future__ import annotations

import os
import shlex
import tempfile
import threading
from typing import Any

from ptxemu.host import ffi
from ptxemu.host.device_view import cpu_as_device, presented
from ptxemu.host.engine import host_program
from ptxemu.host.patching import patched
from ptxemu.host.runtime_symbols import Launcher

ARCH = "sm_100a"

_COMPILING = threading.RLock()  # what compile() patches is global to the process


def compile(fn: Any, *args: Any, options: str = "", **kwargs: Any) -> Any:
    """`cute.compile` on a machine without a GPU, keeping the PTX.

    The target is sm_100a unless `options` or CUTE_DSL_ARCH name another. `args` may be torch, numpy
    or `from_dlpack` tensors on the CPU: during this call they count as device memory. Returns what
    cute.compile returns and raises what it raises.
    """
    import cutlass.cute as cute
    from cutlass.cutlass_dsl.cutlass import CutlassBaseDSL

    with (
        _COMPILING,
        tempfile.TemporaryDirectory(prefix="ptxemu-") as dump_dir,
        cpu_as_device(),
        presented([*args, *kwargs.values()]),
        # With a GPU of another architecture the DSL would make neither engine nor keyword wrapper.
        patched(CutlassBaseDSL, {"_runtime_can_run_compiled": lambda *_: True}),
    ):
        return cute.compile(fn, *args, options=_with_defaults(options, dump_dir), **kwargs)


def run(compiled: Any, *args: Any, launcher: Launcher, **kwargs: Any) -> list[Any]:
    """Call a compiled host function; each kernel launch in it calls `launcher(LaunchRequest)`.

    `compiled` is what cute.compile returned, `args` and `kwargs` its runtime arguments, with all
    tensors in CPU memory. Returns what the launcher returned, launch by launch. An exception in the
    launcher makes the host code stop and leaves here unchanged; ValueError means that `compiled`
    keeps no PTX.
    """
    if ffi.is_ffi(compiled):
        return ffi.call(compiled, args, kwargs, launcher)
    pointers, _adapted = compiled.execution_args.generate_execution_args(args, kwargs)
    return host_program(compiled).call(pointers, launcher)


def _with_defaults(options: str, dump_dir: str) -> str:
    """Add the options that the caller did not give."""
    given = {token.partition("=")[0] for token in shlex.split(options)}
    defaults = {"--keep-ptx": ""}
    if "CUTE_DSL_DUMP_DIR" not in os.environ:
        defaults["--dump-dir"] = dump_dir
    if "CUTE_DSL_ARCH" not in os.environ:
        defaults["--gpu-arch"] = ARCH
    added = [f"{name} {value}" for name, value in defaults.items() if name not in given]
    return " ".join([options, *added])
