"""The primitives as machine code: compiled by llvmlite once per machine, kept on disk, loaded."""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ptxemu.native.ir import Key
from ptxemu.native.primitives import module

_FUNCTION = ctypes.PYFUNCTYPE(ctypes.c_int64, *[ctypes.c_void_p] * 4)  # keeps Python's lock


class Library:
    """addresses: of the function of each primitive."""

    def __init__(self, engine: Any, keys: list[Key]) -> None:
        self._engine = engine  # owns the code
        self.addresses = {key: engine.get_function_address(f"op_{k}") for k, key in enumerate(keys)}
        self.function: Callable[[int], Callable[..., int]] = cache(_FUNCTION)


@cache
def library() -> Library | None:
    """None where llvmlite is not installed, or where PTXEMU_NATIVE is 0."""
    if os.environ.get("PTXEMU_NATIVE") == "0":
        return None
    try:
        import llvmlite.binding as llvm
    except ImportError:
        return None
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    cpu, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    machine = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(
        cpu=cpu, features=features, opt=2, jit=True
    )
    text, keys = module()
    key = f"{llvm.llvm_version_info} {cpu} {features}\n{text}"
    path = _folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.o"
    try:
        code = path.read_bytes()
    except OSError:
        code = _compiled(llvm, machine, text)
        _keep(path, code)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return Library(engine, keys)


def _compiled(llvm: Any, machine: Any, text: str) -> bytes:
    code = llvm.parse_assembly(text)
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(code, passes)
    found: bytes = machine.emit_object(code)
    return found


def _keep(path: Path, code: bytes) -> None:
    """For the next process; a folder that cannot be written costs half a second each time."""
    draft = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(code)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)


def _folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "ptxemu" / "native"


def aligned(nbytes: int) -> np.ndarray:
    """Zeros at a multiple of 64 bytes, uint8."""
    raw = np.zeros(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes]
