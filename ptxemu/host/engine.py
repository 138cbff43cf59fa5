"""A compiled host function as something to call: an engine over its module and our symbols."""

from __future__ import annotations

import atexit
import ctypes
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from ptxemu.host.runtime_symbols import Launcher, Run, RuntimeSymbols
from ptxemu.one_launch import one_at_a_time

_MISSING_PTX = (
    "the compiled function has no PTX: add `--keep-ptx` to the options of cute.compile "
    "(or set CUTE_DSL_KEEP=ptx before importing cutlass), or compile with ptxemu.compile"
)


class HostCode(Protocol):
    """Host code of a compiled function, not yet linked.

    Attributes:
        ptx: Kernels that it launches, '' if there are none.
        name: Name of the function.
    """

    ptx: str
    name: str

    def link(self, bind: Callable[[Iterable[str]], dict[str, int]]) -> Callable[[str], int]:
        """Make the code executable.

        bind maps undefined names to addresses of the CUDA runtime's functions among them. Returns a
        function that finds the entry of a function, which accepts an array of pointers.
        """
        ...


class DslCode:
    """Host code of what `cute.compile` returned.

    It refers to the MLIR module but not to the compiled function, which it must not keep alive.
    """

    def __init__(self, compiled: Any) -> None:
        self.ptx = ptx_of(compiled) if getattr(compiled, "has_gpu_module", True) else ""
        self.name = compiled.function_name
        self._module = compiled.ir_module

    def link(self, bind: Callable[[Iterable[str]], dict[str, int]]) -> Callable[[str], int]:
        """Link as `HostCode.link`; the engine lives as long as the returned function."""
        from cutlass._mlir.execution_engine import ExecutionEngine

        if not hasattr(ExecutionEngine, "init"):  # before 4.8 it links what runs first and last
            _drop_destructors(self._module)  # when it is made, and our symbols would come too late
        # The default optimisation of the engine; without shared libraries, only our symbols count.
        engine = ExecutionEngine(self._module, opt_level=2, shared_libs=[])
        for name, address in bind(_undefined(self._module)).items():
            engine.raw_register_runtime(name, ctypes.c_void_p(address))
        return engine.raw_lookup


class HostProgram:
    """The host code of one compiled function, linked to our CUDA runtime symbols."""

    def __init__(self, code: HostCode) -> None:
        self._has_kernels = bool(code.ptx)
        self._symbols = RuntimeSymbols(code.ptx)
        self.lookup = code.link(self._symbols.bind)
        self._name = code.name
        self._entry: Any = None

    def call(self, pointers: Sequence[Any], launcher: Launcher) -> list[Any]:
        """Call the host function with pointers to its arguments; what the launcher gave, in order.

        Raises the launcher's exception, or RuntimeError where the host code fails by itself.
        """
        result = ctypes.c_int32(0)
        with Run(launcher) as run:
            if self._entry is None:
                self._load_kernels()
                self._entry = self._packed("_mlir_ciface_" + self._name)
            self._entry(*(_address(p) for p in pointers), ctypes.addressof(result))
        if result.value:
            raise RuntimeError(f"the host function returned CUDA error {result.value}")
        return run.results

    def _load_kernels(self) -> None:
        """Load the library, then its kernels, as the DSL does before the first call."""
        if not self._has_kernels:
            return
        library, device, code = ctypes.c_void_p(), ctypes.c_int32(0), ctypes.c_int32(0)
        slot = ctypes.c_void_p(ctypes.addressof(library))
        by_address = [ctypes.addressof(x) for x in (slot, device, code)]
        self._packed("cuda_init")(by_address[0], by_address[2])
        self._packed("cuda_load_to_device")(*by_address)

    def _packed(self, name: str) -> Any:
        """Return an engine function that accepts the addresses of its arguments and result."""
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.lookup(name))
        return lambda *addresses: function((ctypes.c_void_p * len(addresses))(*addresses))


def _address(pointer: Any) -> int | None:
    return pointer.value if isinstance(pointer, ctypes.c_void_p) else ctypes.c_void_p(pointer).value


def _drop_destructors(module: Any) -> None:
    """Drop the destructors of the kernel library, which is not unloaded here."""
    for operation in [*module.body.operations]:
        if operation.operation.name == "llvm.mlir.global_dtors":
            operation.operation.erase()


def _undefined(module: Any) -> list[str]:
    """Names of the functions that the LLVM-dialect module declares and does not define."""
    return [
        operation.attributes["sym_name"].value
        for operation in module.body.operations
        if operation.operation.name == "llvm.func" and not len(operation.regions[0].blocks)
    ]


# ---- the PTX of a compiled function


def ptx_of(compiled: Any) -> str:
    """The PTX text that a compiled function keeps.

    Looked for in its artifacts (text, or the path of a dump that appeared later) and, for a module
    compiled to textual instructions, in the module. Raises ValueError where there is none.
    """
    artifacts = getattr(compiled, "artifacts", None)
    text = (artifacts.PTX if artifacts is not None else None) or ""
    if text and ".version" not in text:
        with suppress(OSError):
            text = Path(text).read_text()
    if ".version" not in text:
        text = _embedded_ptx(compiled.ir_module)
    if not text:
        raise ValueError(_MISSING_PTX)
    return text.rstrip("\0")


def _embedded_ptx(module: Any) -> str:
    """Return PTX in place of a cubin among the module's global constants, or ''."""
    for operation in module.body.operations:
        if operation.operation.name == "llvm.mlir.global" and "value" in operation.attributes:
            data = getattr(operation.attributes["value"], "value_bytes", b"")
            if b"\n.version " in data and b".target sm_" in data:
                return data.rstrip(b"\0").decode()
    return ""


# ---- one program per compiled function

_PROGRAMS: dict[int, HostProgram] = {}  # by id; an entry leaves with its compiled function
atexit.register(_PROGRAMS.clear)  # engines must go while ctypes callbacks can still run


@one_at_a_time
def host_program(compiled: Any) -> HostProgram:
    """The program of what `cute.compile` returned, or of `HostCode`, built at its first use.

    Compiled functions are not hashed: those of tvm-ffi compare by handle, which may be null.
    """
    key = id(compiled)
    if key not in _PROGRAMS:
        _PROGRAMS[key] = HostProgram(compiled if hasattr(compiled, "link") else DslCode(compiled))
        weakref.finalize(compiled, _PROGRAMS.pop, key, None)
    return _PROGRAMS[key]
