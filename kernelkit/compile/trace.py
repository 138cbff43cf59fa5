"""Compile with the DSL: trace, look the traced code up, and only where it is new run the passes.

The one file of this package that needs MLIR. The DSL traces under process-wide state: one thread
compiles at a time.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kernelkit.compile.artifact import FORMAT, Artifact
from kernelkit.compile.signature import Signature, described, signature_of
from kernelkit.compile.sources import ROOT

_DSL = tuple("nvidia-cutlass-dsl" + end for end in ("", "-libs-base"))
_LIBRARIES = {12: "nvidia-cutlass-dsl-libs-cu12", 13: "nvidia-cutlass-dsl-libs-cu13"}
# Code for every x86-64 processor: an artefact may be run on another machine.
_HOST = {"host_triple": "x86_64-unknown-linux-gnu", "host_cpu": "x86-64"}
_INTERFACE = "_mlir_ciface_"
_LINES = "CUTE_DSL_LINEINFO"
PTXAS_VARIABLE = "BLACKWELL_KERNELS_PTXAS"  # options of ptxas, for kernels that are only emulated


@cache
def toolchain() -> dict[str, str]:
    """Versions of what compiles, by name of the package. Of the DSL's libraries, which hold ptxas,
    only those that it loads here: `libraries_for`."""
    libraries = _versions(_LIBRARIES.values())
    loaded = libraries_for(
        _driver(), [major for major, of in _LIBRARIES.items() if of in libraries]
    )
    return _versions(_DSL) | {_LIBRARIES[n]: libraries[_LIBRARIES[n]] for n in loaded}


def _versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of those packages that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def libraries_for(driver: int | None, installed: Sequence[int]) -> list[int]:
    """Return the major version of CUDA whose libraries the DSL loads, as a list; [] for none.

    It loads the newest ones that the driver supports, or the newest ones of all without a driver,
    so an update of the driver can change the machine code of every kernel. Source: `_mlir_libs` of
    CuTe DSL 4.8.1.

    driver: major version of CUDA that the driver supports; None without one
    installed: major versions whose libraries are installed
    """
    fitting = [major for major in installed if driver is None or major <= driver]
    return sorted(fitting)[-1:]


def _driver() -> int | None:
    """Major version of CUDA that the driver of this machine supports; None without one."""
    number = ctypes.c_int(0)
    try:
        code = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return None if code else number.value // 1000


def settings() -> dict[str, str]:
    """Environment variables that change what is made: the DSL's, and options of ptxas; where lines
    are kept, the folder that they are of."""
    found = {
        name: value
        for name, value in os.environ.items()
        if name == PTXAS_VARIABLE
        or (
            name.startswith("CUTE_DSL_")
            and not name.startswith("CUTE_DSL_LOG_")  # SGLang sets two in its own processes
            and not name.endswith(("_DIR", "_KEEP"))
        )
    }
    return found | {"root": str(ROOT)} if _LINES in found else found


class _Known(BaseException):
    """No error, and not to be taken for one: it leaves a compile that is not needed."""

    def __init__(self, artifact: Artifact) -> None:
        super().__init__("compiled before")
        self.artifact = artifact


class Traced:
    """A trace; `key` identifies the traced code, `artifact` is the result.

    look_up: look_up(key) returns an earlier artifact of the same code, or None. Its `about` is
        unchanged.
    name: name of the host function and prefix of its kernels' names; '' for the DSL's own
    """

    def __init__(
        self, given: tuple, arch: str, look_up: Callable[[str], Artifact | None], name: str = ""
    ) -> None:
        self.key = ""
        self.found = False
        self._arch, self._examples = arch, given[1:]
        self._look_up = look_up
        enabled = gc.isenabled()
        gc.disable()  # a trace is hundreds of thousands of objects, which all stay until its end
        try:
            with _named(given[0], name):
                self.artifact = self._compile(*given)
        finally:
            if enabled:
                gc.enable()

    def _compile(self, function: Callable, *examples: Any) -> Artifact:
        import cutlass.cute as cute

        # The DSL writes the files that it is asked to keep, and reads them back at once.
        with tempfile.TemporaryDirectory() as folder:
            options = f"--gpu-arch {self._arch} --keep-ptx --dump-dir {folder}"
            ptxas = os.environ.get(PTXAS_VARIABLE)
            if ptxas:
                options += f" --ptxas-options '{ptxas}'"
            try:
                compiled = cute.compile(
                    function,
                    *examples,
                    options=options,
                    no_jit_engine=True,
                    trace_finalize_hooks=self._after_trace,
                )
            except _Known as known:
                self.found = True
                return known.artifact
            return _artifact(compiled, self._arch, examples)

    def _after_trace(self, _dsl: Any, module: Any, _name: str) -> None:
        self.key = _key_of(module, self._arch, self._examples)
        known = self._look_up(self.key)
        if known is not None:
            raise _Known(known)


@contextmanager
def _named(function: Any, name: str) -> Iterator[None]:
    """Within the block the DSL names the host function and the kernels of an object `name`, instead
    of listing all argument types. The DSL keeps names per class."""
    kind = type(function)
    methods = [getattr(kind, method, None) for method in ("__call__", "kernel")] if name else []
    named = [method for method in methods if hasattr(method, "set_name_prefix")]
    for method in named:
        # The word that it would add is in the name where it is wanted: `kernelkit.compile.names`.
        method.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)
    try:
        yield
    finally:
        for method in named:
            method.set_name_prefix("")


def _key_of(module: Any, arch: str, examples: tuple) -> str:
    """Return a digest of the traced code, versions and settings of the compiler, and the arguments,
    which may differ for the same code."""
    code = module.operation.get_asm(enable_debug_info=_LINES in os.environ)
    arguments = [asdict(argument) for argument in described(examples)]
    others = json.dumps([FORMAT, arch, toolchain(), settings(), arguments], sort_keys=True)
    return hashlib.sha256(f"{others}\n{code}".encode()).hexdigest()


def _artifact(compiled: Any, arch: str, examples: tuple) -> Artifact:
    signature = _signature(compiled, examples)
    return Artifact(
        function=compiled.function_name,
        arch=arch,
        ptx=compiled.artifacts.PTX,
        host=_host_object(compiled),
        signature=signature.to_json(),
        about={"toolchain": toolchain(), "ptxas": os.environ.get(PTXAS_VARIABLE, "")},
    )


def _signature(compiled: Any, examples: tuple) -> Signature:
    wanted = _INTERFACE + compiled.function_name
    for operation in compiled.ir_module.body.operations:
        names = operation.attributes
        if operation.operation.name == "llvm.func" and names["sym_name"].value == wanted:
            return signature_of(examples, str(names["function_type"]))
    raise RuntimeError(f"the DSL made no function {wanted}")


def _host_object(compiled: Any) -> bytes:
    """The module as a relocatable object, the cubin among its constants."""
    _load_runtime()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "host.o")
        engine = compiled.export_provider.mlirExecutionEngine
        engine.dump_object_file_pic(compiled.ir_module, str(path), compiled.function_name, **_HOST)
        return path.read_bytes()


@cache
def _load_runtime() -> None:
    """Make the DSL's runtime library visible: it resolves symbols even where it only writes."""
    import cutlass.cute as cute

    for path in cute.runtime.find_runtime_libraries(enable_tvm_ffi=False):
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
