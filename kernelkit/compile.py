"""Compile a CuTe DSL function once per config and architecture, with its PTX kept.

Arguments are fake tensors with dynamic shapes and strides, so one compile serves all lengths, and
no GPU is needed. The DSL traces under process-wide state: one thread compiles at a time.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Hashable
from typing import Any

ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a")

_compiled: dict[tuple[Hashable, str], Any] = {}
_lock = threading.Lock()


def compile_once(key: Hashable, arch: str, describe: Callable[[], tuple]) -> Any:
    """The compiled host function for (`key`, `arch`), from this process's cache if it is there.

    describe() -> (function, *example arguments) for `cute.compile`; it is called only to compile.
    The result is callable with runtime arguments and holds its text in `artifacts.PTX`.
    """
    if arch not in ARCHITECTURES:
        raise ValueError(f"arch {arch!r}: one of {ARCHITECTURES}")
    with _lock:
        if (key, arch) not in _compiled:
            _compiled[key, arch] = _compile(arch, *describe())
        return _compiled[key, arch]


def forget() -> int:
    """Drop every compiled function of this process, several MB each, and say how many they were;
    who holds one keeps it."""
    with _lock:
        count = len(_compiled)
        _compiled.clear()
        return count


def _compile(arch: str, function: Callable, *arguments: Any) -> Any:
    import cutlass.cute as cute

    # The DSL writes the files that it is asked to keep, and reads them back at once.
    with tempfile.TemporaryDirectory() as folder:
        options = f"--gpu-arch {arch} --keep-ptx --keep-cubin --dump-dir {folder}"
        return cute.compile(function, *arguments, options=options)
