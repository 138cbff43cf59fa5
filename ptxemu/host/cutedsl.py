"""CuTe DSL functions without a GPU: compile for sm_100a, and run the host code into a launcher."""

from __future__ import annotations

import ctypes
import os
import shlex
import tempfile
import threading
import types
from functools import lru_cache
from typing import Any

from ptxemu.host.device_view import as_device, cpu_as_device, presented
from ptxemu.host.engine import HostProgram, host_program
from ptxemu.host.patching import patched
from ptxemu.host.runtime_symbols import Launcher, Run

# The global by which the wrapper that tvm-ffi generates for keyword arguments calls its function.
_TARGET = "__i_target_func"


def is_ffi(compiled: Any) -> bool:
    """Whether the compiled function came from `--enable-tvm-ffi`."""
    return any(base.__name__ == "TVMFFIJitCompiledFunctionBase" for base in type(compiled).__mro__)


def call(
    compiled: Any, args: tuple[Any, ...], kwargs: dict[str, Any], launcher: Launcher
) -> list[Any]:
    """Call the host function; what the launcher gave for each launch, in order.

    Tensors in `args` may be torch or numpy arrays on the CPU or tensors of the DSL. Raises the
    launcher's exception, TypeError for arguments that the host code refuses.
    """
    _load_library()
    function = _function(host_program(compiled), compiled.function_name)
    described: Any = getattr(compiled, "execution_args", None)  # older DSLs have none
    if getattr(described, "has_pointer_address_arg_specs", False):
        args, kwargs = described.convert_python_pointer_args_for_tvm_ffi(args, kwargs)
    with Run(launcher) as run:
        _with_keywords(compiled, function)(*args, **kwargs)
    return run.results


def positional(compiled: Any, launcher: Launcher) -> Any:
    """Return a tvm-ffi function that calls the host function.

    It serves callers by handle: other languages, and the DSL's wrappers.
    """
    import tvm_ffi

    def call_positional(*args: Any) -> None:
        _load_library()
        with Run(launcher):
            _function(host_program(compiled), compiled.function_name)(*_plain(args))

    def _plain(values: Any) -> list[Any]:
        return [_plain(value) if isinstance(value, tvm_ffi.Array) else value for value in values]

    return tvm_ffi.convert(call_positional)


def _function(program: HostProgram, name: str) -> Any:
    """A Python callable for the module's tvm-ffi entry, for positional arguments."""
    import tvm_ffi

    function = tvm_ffi.Function.__from_mlir_packed_safe_call__(
        program.lookup("__tvm_ffi_" + name), keep_alive_object=program
    )
    return lambda *args: function(*as_device(args))


def _with_keywords(compiled: Any, function: Any) -> Any:
    """Wrap `function` in the DSL's wrapper for keywords, defaults and dataclasses."""
    if not hasattr(compiled, "_kwargs_wrapper"):
        return function
    wrapper = compiled._kwargs_wrapper
    if wrapper is None:
        raise ValueError(
            "compiled without an execution engine, so the DSL made no keyword wrapper: compile "
            "with ptxemu.compile, or set CUTE_DSL_ARCH to the target before importing cutlass"
        )
    bound = types.FunctionType(
        wrapper.__code__,
        {**wrapper.__globals__, _TARGET: function},
        wrapper.__name__,
        wrapper.__defaults__,
        wrapper.__closure__,
    )
    bound.__kwdefaults__ = wrapper.__kwdefaults__
    return bound


@lru_cache(maxsize=1)
def _load_library() -> None:
    """Make the symbols of libtvm_ffi visible to the engine."""
    import tvm_ffi

    ctypes.CDLL(tvm_ffi.libinfo.find_libtvm_ffi(), mode=ctypes.RTLD_GLOBAL)


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
    if is_ffi(compiled):
        return call(compiled, args, kwargs, launcher)
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
