"""Primitives and routines as machine code: compiled by llvmlite once per machine, kept on disk,
loaded.

A file of the cache is named by what its code depends on: the sources of this package and of the
numerics that it follows, LLVM, and the processor. It begins with a line of JSON, which has the keys
of the primitives and a checksum, so that a start of Python translates nothing; a file that is not
whole is compiled anew.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from ptxemu.guard import GUARD, warn
from ptxemu.native import accesses, operands, primitives, shadow
from ptxemu.native.ir import Key
from ptxemu.native.routines import ROUTINES, symbol
from ptxemu.trusted import write_whole

_FASTCALL = 0x80  # METH_FASTCALL, of Python's stable interface
_DEFINITIONS: list[Any] = []  # Python only borrows a definition
NAMES = (
    "PyLong_AsLongLong",
    "PyLong_FromLongLong",
    "PyFloat_AsDouble",
    "PyFloat_FromDouble",
    "PyErr_Occurred",
    "PyErr_BadArgument",
)


class _Definition(ctypes.Structure):
    """PyMethodDef"""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("text", ctypes.c_char_p),
    )


def interface() -> dict[str, int]:
    """The addresses of Python's functions that machine code calls."""
    return {
        name: ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value or 0
        for name in NAMES
    }


def builtin(name: str, address: int, owner: object = None) -> Callable[..., Any]:
    """Return a Python function that calls the machine code at an address.

    The code has the type `PyObject *(PyObject *owner, PyObject *const *arguments, Py_ssize_t
    count)`.
    """
    definition = _Definition(name.encode(), address, _FASTCALL, None)
    _DEFINITIONS.append(definition)
    make = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)(
        ("PyCFunction_NewEx", ctypes.pythonapi)
    )
    function: Callable[..., Any] = make(ctypes.addressof(definition), owner, None)
    return function


_KEPT = 8  # files; others are of sources that have changed since


class Library:
    """Compiled primitives and routines.

    addresses: address of the function of each primitive.
    segment: runs a table of these functions.
    """

    def __init__(self, engine: Any, keys: list[Key]) -> None:
        self._engine = engine  # owns the code
        self.addresses = {key: engine.get_function_address(f"op_{k}") for k, key in enumerate(keys)}
        segment = engine.get_function_address("python.segment")
        self.segment = builtin("segment", segment) if segment else _without_primitives
        self.routine = cache(self._routine)

    def _routine(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A routine as machine code: its numbers are Python's, its pointers are addresses."""
        name = symbol(function)
        address = self._engine.get_function_address(f"python.{name}")
        if not address:
            raise KeyError(f"{name} is not a routine of this library")
        return builtin(function.__name__, address)


def _without_primitives(*_: int) -> int:
    raise TypeError("a library of another package has no primitives")


class _Code(NamedTuple):
    keys: list[Key]
    code: bytes


class Source(NamedTuple):
    """Source of a library.

    digest: hash of everything the library depends on.
    routines: returns the functions.
    primitives: returns the primitives' IR and keys; None if there are none.
    """

    digest: bytes
    routines: Callable[[], list[Callable[..., Any]]]
    primitives: Callable[[], tuple[str, list[Key]]] | None = None


def compiled(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """A routine as machine code, or None where there is none."""
    found = library()
    return None if found is None else found.routine(function)


@cache
def library() -> Library | None:
    """Return the library; None if llvmlite is not installed or PTXEMU_NATIVE is 0."""
    if os.environ.get("PTXEMU_NATIVE") == "0":
        return None
    try:
        import llvmlite.binding as llvm
    except ImportError:
        return None
    return load(llvm, _folder(), _own())


def library_of(*modules: ModuleType) -> Library | None:
    """Return the library of another package's routines, in modules that also define their
    constants.

    The result is None in the cases in which `library` returns None.
    """
    if library() is None:
        return None
    import llvmlite.binding as llvm

    digest = hashlib.sha256(_sources())
    for module in modules:
        digest.update(Path(str(module.__file__)).read_bytes())
    return load(llvm, _folder(), Source(digest.digest(), lambda: routines_of(*modules)))


def _own() -> Source:
    """Return the source of this package's library."""

    return Source(_sources(), lambda: routines_of(accesses, operands, shadow), primitives.module)


def routines_of(*modules: ModuleType) -> list[Callable[..., Any]]:
    """Return the routines that these modules define."""
    names = {module.__name__ for module in modules}
    return [each for each in ROUTINES.values() if each.__module__ in names]


@contextmanager
def without() -> Iterator[None]:
    """Run as if llvmlite were not installed; programs made inside stay without machine code."""
    was = os.environ.get("PTXEMU_NATIVE")
    os.environ["PTXEMU_NATIVE"] = "0"
    library.cache_clear()
    try:
        yield
    finally:
        library.cache_clear()
        os.environ.pop("PTXEMU_NATIVE")
        if was is not None:
            os.environ["PTXEMU_NATIVE"] = was


def load(llvm: Any, folder: Path, source: Source) -> Library:
    """Load the library from a file of the folder, or compile it and keep it there."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    cpu, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    machine = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(
        cpu=cpu, features=features, opt=2, jit=True
    )
    key = hashlib.sha256(f"{llvm.llvm_version_info} {cpu} {features}".encode())
    key.update(source.digest)
    path = folder / f"{key.hexdigest()[:24]}.o"
    found = _read(path)
    if found is None:
        found = _compiled(llvm, machine, source)
        _keep(path, found)
    for name, address in interface().items():
        llvm.add_symbol(name, address)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(found.code))
    engine.finalize_object()
    return Library(engine, found.keys)


def _sources() -> bytes:
    """A digest of the files that say what is compiled."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for folder in (here, here.parent / "numerics"):
        for path in sorted(folder.glob("*.py")):
            digest.update(f"{path.name}\n".encode() + path.read_bytes())
    return digest.digest()


def _compiled(llvm: Any, machine: Any, source: Source) -> _Code:
    from ptxemu.native import translate  # only here: most starts of Python find a file

    text, keys = source.primitives() if source.primitives else ("", [])
    code = llvm.parse_assembly(translate.module(source.routines()))  # loops: it pays to optimise
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_vectorization = options.slp_vectorization = True
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(code, passes)
    code.link_in(llvm.parse_assembly(text))  # written as they are to be: vectors, nothing to spare
    return _Code(keys, machine.emit_object(code))


def _read(path: Path) -> _Code | None:
    """Read a file of code; None if it is missing or broken, or if others may write it."""
    try:
        head, _, code = GUARD.read(path).partition(b"\n")
        told = json.loads(head)
        keys = [(name, tuple(types)) for name, types in told["keys"]]
        if told["checksum"] != _checksum(keys, code):
            return None
    except OSError as error:
        warn(error)
        return None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return _Code(keys, code)


def _checksum(keys: list[Key], code: bytes) -> str:
    return hashlib.sha256(repr(keys).encode() + code).hexdigest()


def _keep(path: Path, found: _Code) -> None:
    """Keep the code for the next process.

    If the folder cannot be written, each process compiles again.
    """
    head = json.dumps({"checksum": _checksum(*found), "keys": found.keys})
    try:
        GUARD.make(path.parent)
        write_whole(path, head.encode() + b"\n" + found.code)
        by_age = sorted(path.parent.glob("*.o"), key=lambda file: file.stat().st_mtime)
        for old in by_age[:-_KEPT]:
            old.unlink()
    except OSError as error:
        warn(error)


def _folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "ptxemu" / "native"


def aligned(nbytes: int) -> np.ndarray:
    """Zeros at a multiple of 64 bytes, uint8."""
    raw = np.zeros(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes]
