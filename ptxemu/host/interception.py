"""Send every call of a compiled DSL function, explicit or through `@cute.jit`, to a launcher."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from ptxemu.host import cutedsl
from ptxemu.host.cutedsl import run
from ptxemu.host.engine import host_program
from ptxemu.host.patching import patched, pretended, threads_within
from ptxemu.host.runtime_symbols import Launcher

# Libraries that keep compiled kernels on disk load what they have exported, and go on without that
# where an export fails.
_NOT_EXPORTED = "ptxemu: emulated kernels cannot be exported, since an export has no PTX"
_NOT_LOADED = "ptxemu: {} cannot be loaded, since an exported kernel has no PTX"


class _Executor:
    """Result of `compiled.to(device)`: callable like the DSL's executor."""

    def __init__(self, compiled: Any, launcher: Launcher) -> None:
        self._compiled = compiled
        self._launcher = launcher

    def generate_execution_args(self, *args: Any, **kwargs: Any) -> tuple[list[Any], list[Any]]:
        return self._compiled.execution_args.generate_execution_args(args, kwargs)

    def run_compiled_program(self, pointers: list[Any]) -> int:
        host_program(self._compiled).call(pointers, self._launcher)
        return 0

    def __call__(self, *args: Any, **kwargs: Any) -> int:
        run(self._compiled, *args, launcher=self._launcher, **kwargs)
        return 0


@contextmanager
def intercepted(launcher: Launcher) -> Iterator[None]:
    """While active, compiled functions run their host code here and launch through `launcher`."""
    from cutlass.cute import runtime
    from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitCompiledFunction

    def run_program(self: Any, pointers: list[Any]) -> int:
        return _Executor(self, launcher).run_compiled_program(pointers)

    def to(self: Any, _device: int | None = None) -> _Executor:
        return _Executor(self, launcher)

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        cutedsl.call(self, args, kwargs, launcher)

    def function(self: Any) -> Any:
        return cutedsl.positional(self, launcher)

    def export(self: Any, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(_NOT_EXPORTED)

    def load(file_path: object, **_: Any) -> None:
        raise RuntimeError(_NOT_LOADED.format(file_path))

    with ExitStack() as stack:
        plain = {"run_compiled_program": run_program, "to": to, "export_to_c": export}
        stack.enter_context(patched(runtime, {"load_module": load}))
        stack.enter_context(patched(CudaDialectJitCompiledFunction, plain))
        for number, compiled_class in enumerate(_ffi_classes()):
            changes: dict[str, Any] = {"__call__": call}
            if not number:  # the others are derived from it
                changes |= {"_create_tvm_ffi_function": function, "export_to_c": export}
            stack.enter_context(patched(compiled_class, changes))
        stack.callback(pretended.reset, pretended.set(launcher))
        stack.enter_context(threads_within(nullcontext))
        yield


def _ffi_classes() -> list[type]:
    try:
        from cutlass.cutlass_dsl import tvm_ffi_provider as provider
    except ImportError:  # apache-tvm-ffi is optional
        return []
    return [
        provider.TVMFFIJitCompiledFunctionBase,
        provider.TVMFFIJitCompiledFunction,
        provider.TVMFFIJitCompiledFunctionWithKwargs,
    ]
