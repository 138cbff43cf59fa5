"""A kernel's host function, compiled once per config and architecture: by this process, by another
one that left it in the cache on disk, or ahead of time.

Two keys find a kernel on disk. The first is its config and a fingerprint of every file that it is
traced from: a hit takes milliseconds and imports nothing of the DSL. Where it misses, or where
something in those files was patched at run time, the kernel is traced, and the traced code is the
second key: it needs no trust, and a change that leaves the kernel as it was compiles nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from kernelkit.compile import aot, pristine, sources, store
from kernelkit.compile.arch import ARCHITECTURES
from kernelkit.compile.artifact import FORMAT, Artifact
from kernelkit.compile.kernel import CompiledKernel
from kernelkit.compile.keys import KernelKey, NotPlain
from kernelkit.compile.names import kernel_name
from kernelkit.compile.store import Store
from kernelkit.compile.trace import PTXAS_VARIABLE, Traced, settings, toolchain

_compiled: dict[tuple[str, Hashable, str, str | None], CompiledKernel] = {}
_lock = threading.Lock()


def compile_once(
    config: Hashable, arch: str, source: str | Callable[[], tuple]
) -> CompiledKernel | None:
    """The compiled kernel, found or compiled.

    Args:
        config: what it is compiled for; a frozen dataclass of plain values is kept on disk, too.
        arch: one of `kernelkit.compile.arch.ARCHITECTURES`.
        source: 'package.module', whose `host_function(config, arch)` gives what to compile,
            (function, *example arguments) for `cute.compile`, or 'package.module:function'; it is
            imported only to compile. A function without arguments will do, too, for kernels of
            tests and experiments, which are traced by each process.

    Returns:
        The kernel, from this process's memory if it is there; None while `collecting`.

    Raises:
        ValueError: for another arch.
        ImportError: where it has to be compiled, and the DSL is not there.
    """
    if arch not in ARCHITECTURES:
        raise ValueError(f"arch {arch!r}: one of {ARCHITECTURES}")
    name = source if isinstance(source, str) else source.__qualname__
    collected = _collected.get()
    if collected is not None:
        collected.append(KernelKey(name, config, arch))
        return None
    known = (name, config, arch, os.environ.get(PTXAS_VARIABLE))
    with _lock:
        if known not in _compiled:
            _compiled[known] = _make(config, arch, source)
        return _compiled[known]


_collected: ContextVar[list[KernelKey] | None] = ContextVar("collected", default=None)


@contextmanager
def collecting() -> Iterator[list[KernelKey]]:
    """Within the block nothing is compiled or launched: the kernels that would be are in the list,
    in order. Tensors may be on the device 'meta' then."""
    keys: list[KernelKey] = []
    token = _collected.set(keys)
    try:
        yield keys
    finally:
        _collected.reset(token)


def in_memory() -> list[tuple[KernelKey, CompiledKernel]]:
    """Every compiled kernel that this process holds."""
    with _lock:
        return [(KernelKey(*known[:3]), made) for known, made in _compiled.items()]


def forget() -> int:
    """Drop every compiled kernel of this process's memory, and say how many they were; who holds
    one keeps it."""
    with _lock:
        count = len(_compiled)
        _compiled.clear()
        return count


def _make(config: Hashable, arch: str, source: str | Callable[[], tuple]) -> CompiledKernel:
    key = KernelKey(source, config, arch) if isinstance(source, str) else None
    return CompiledKernel(_find_or_compile(config, arch, source), key)


def _find_or_compile(config: Hashable, arch: str, source: str | Callable[[], tuple]) -> Artifact:
    if not isinstance(source, str):
        return _compile(source, arch, store.from_environment())[0]
    key = KernelKey(source, config, arch)
    aot.note(key)
    ready = aot.artefact_for(key)
    if ready is not None:
        return ready
    kept, digest = store.from_environment(), _digest(key)
    if kept is None or digest is None:
        return _compile_key(key, kept)[0]
    found = _from_config(kept, digest)
    if found is not None:
        return found
    with kept.compiling(digest):
        found = _from_config(kept, digest)  # by a process that was quicker
        if found is not None:
            return found
        artifact, traced = _compile_key(key, kept)
        # Only now all its modules are loaded.
        if not pristine.patched(key.module):
            kept.put_config(digest, {"kernel": traced, "key": json.loads(key.to_text())})
        return artifact


def _from_config(kept: Store, digest: str) -> Artifact | None:
    content = kept.config(digest)
    return None if content is None else kept.kernel(content["kernel"])


def _digest(key: KernelKey) -> str | None:
    """Return a digest of the config and all inputs of compilation; None if they do not identify
    it."""
    try:
        if pristine.patched(key.module):
            return None
        parts = [FORMAT, key.to_text(), sources.fingerprint(key.module)]
    except NotPlain:
        return None
    parts += [kernel_name(key), toolchain(), settings(), sys.version_info[:2]]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _compile_key(key: KernelKey, kept: Store | None) -> tuple[Artifact, str]:
    try:
        return _compile(key.host_function, key.arch, kept, kernel_name(key))
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "cutlass":
            raise
        raise ImportError(
            f"there is no compiled kernel {key.title()}, and nvidia-cutlass-dsl, which would "
            f"compile it, is not installed. Install it, or set {aot.VARIABLE} to a folder with "
            "the kernel: see python -m kernelkit aot"
        ) from error


def _compile(
    describe: Callable[[], tuple], arch: str, kept: Store | None, name: str = ""
) -> tuple[Artifact, str]:
    """(what was compiled, the key of the traced code)."""
    traced = Traced(describe(), arch, kept.kernel if kept else lambda _: None, name)
    if kept is not None and not traced.found:
        kept.put_kernel(traced.key, traced.artifact)
    return traced.artifact, traced.key
