"""Compiled kernels in a folder, shared by processes, bounded, and never trusted blindly.

    kernels/<first two digits>/<digest of the traced code>.kernel    an `Artifact`
    configs/<first two digits>/<digest of config and sources>.json   the digest of its kernel

A file appears whole, by renaming, so a killed process leaves no torn one. A damaged file is removed
with a warning, and its kernel is compiled again. A folder that cannot be written causes one warning
and no error. Kernels are executed, so a folder or file that another user may write is not used
(`kernelkit.compile.trusted`); a warning names it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kernelkit.compile.artifact import Artifact, ArtifactError
from kernelkit.compile.keys import KernelKey
from kernelkit.compile.outside import FileError, json_of, require_fields
from kernelkit.compile.trusted import UNFINISHED, Guard, Untrusted, write_whole

VARIABLE = "BLACKWELL_KERNELS_CACHE"
LIMIT_VARIABLE = "BLACKWELL_KERNELS_CACHE_LIMIT"
SHARED_VARIABLE = "BLACKWELL_KERNELS_SHARED"  # folders that may belong to others
GUARD = Guard(SHARED_VARIABLE)
OFF = ("off", "0", "no")
DEFAULT_LIMIT = "2G"
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_DAY = 86_400  # seconds
_SELDOM = 3600  # seconds after which a use is noted anew
_BETWEEN_LOOKS = 32  # files written between two looks at the size of the folder
_PATIENCE = 900  # seconds to wait for another process that compiles the same kernel


class CacheWarning(UserWarning):
    """The cache of compiled kernels could not do its work; kernels are compiled instead."""


def sweep(paths: Iterable[Path]) -> None:
    """Remove those that are a day old, which killed processes left."""
    for path in paths:
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _DAY:
                path.unlink()


def bytes_of(text: str) -> int:
    """'512M' -> bytes. ValueError for what is no size."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", text.strip(), re.I)
    if match is None:
        raise ValueError(f"{text!r} is not a size; write for example 512M or 2G")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def from_environment() -> Store | None:
    """The store that the environment names; None where it is switched off."""
    named, limit = os.environ.get(VARIABLE, ""), os.environ.get(LIMIT_VARIABLE, DEFAULT_LIMIT)
    return _opened(named or str(_default_folder()), limit)


@cache
def _opened(named: str, limit: str) -> Store | None:
    if named.lower() in OFF:
        return None
    return Store(Path(named).expanduser(), bytes_of(limit))


def _default_folder() -> Path:
    from platformdirs import user_cache_path

    return user_cache_path("blackwell-kernels")


@dataclass(frozen=True)
class Entry:
    path: Path
    nbytes: int
    used: float


class Store:
    """Folder of compiled kernels.

    folder: created if missing
    limit: bytes above which least recently used entries are removed
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.limit = limit
        self._writes = 0
        self._complaints: set[str] = set()

    # ---- reading

    def config(self, digest: str) -> dict[str, Any] | None:
        """Return the content from `put_config`, None if there is nothing usable."""
        path = self._config_path(digest)
        data = self._read(path)
        if data is None:
            return None
        try:
            content = json_of(data, "it")
            require_fields("it", content, {"kernel": str})
        except FileError as error:
            self._drop(path, f"damaged: {error}")
            return None
        return content

    def kernel(self, digest: str) -> Artifact | None:
        """Return the artefact; None if there is none. A damaged one is removed with a warning."""
        path = self._kernel_path(digest)
        data = self._read(path)
        if data is None:
            return None
        try:
            return Artifact.from_bytes(data)
        except ArtifactError as error:
            self._drop(path, str(error))
            return None

    def _read(self, path: Path) -> bytes | None:
        try:
            data = GUARD.read(path)
            if time.time() - path.stat().st_mtime > _SELDOM:
                os.utime(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._complain(error)
            return None
        return data

    def _drop(self, path: Path, why: str) -> None:
        warnings.warn(f"{path} is {why}; compiling again", CacheWarning, stacklevel=4)
        with contextlib.suppress(OSError):
            path.unlink()

    # ---- writing

    def put_kernel(self, digest: str, artifact: Artifact) -> None:
        """Keep an artefact under the digest of its traced code."""
        self._write(self._kernel_path(digest), artifact.to_bytes())

    def put_config(self, digest: str, content: dict[str, Any]) -> None:
        """Keep which kernel a config became: content['kernel'] is its digest."""
        self._write(self._config_path(digest), json.dumps(content, indent=1).encode())

    def _write(self, path: Path, data: bytes) -> None:
        try:
            GUARD.make(path.parent)
            write_whole(path, data)
        except OSError as error:
            self._complain(error)
            return
        if self._writes % _BETWEEN_LOOKS == 0:
            self.evict()
        self._writes += 1

    def _complain(self, error: OSError) -> None:
        """Warn once of each file or folder that others may write, and once of all else: what is
        wrong will not change soon."""
        culprit = error.culprit if isinstance(error, Untrusted) else ""
        if culprit not in self._complaints:
            self._complaints.add(culprit)
            message = f"the cache of compiled kernels in {self.folder} cannot be used: {error}"
            warnings.warn(f"{message}; continuing without it", CacheWarning, stacklevel=4)

    @contextmanager
    def compiling(self, digest: str) -> Iterator[None]:
        """Within the block no other process compiles what has this digest. The lock of a process
        that dies is free."""
        from filelock import FileLock, Timeout

        path = self.folder / "locks" / digest[:2] / f"{digest}.lock"
        with contextlib.ExitStack() as stack:
            try:
                GUARD.make(path.parent)
                stack.enter_context(FileLock(path, timeout=_PATIENCE))
            except (OSError, NotImplementedError) as error:
                if not isinstance(error, Timeout):
                    self._complain(error if isinstance(error, OSError) else OSError(str(error)))
            yield

    # ---- the whole folder

    def entries(self) -> list[Entry]:
        """All files, the least recently used first."""
        found = []
        for kind in ("kernels", "configs"):
            for path in (self.folder / kind).glob("*/[!.]*"):
                with contextlib.suppress(OSError):
                    status = path.stat()
                    found.append(Entry(path, status.st_size, status.st_mtime))
        return sorted(found, key=lambda entry: entry.used)

    def evict(self) -> int:
        """Remove what was used least recently until the folder is within its limit; bytes gone."""
        entries = self.entries()
        excess = sum(entry.nbytes for entry in entries) - self.limit
        removed = 0
        for entry in entries:
            if removed >= excess:
                break
            with contextlib.suppress(OSError):
                entry.path.unlink()
                removed += entry.nbytes
        self._sweep()
        return removed

    def _sweep(self) -> None:
        """Remove half-written files and locks of killed processes after a day."""
        sweep((*self.folder.glob(f"*/*/{UNFINISHED}*"), *self.folder.glob("locks/*/*.lock")))

    def listed(self) -> list[dict[str, Any]]:
        """Kernels with a config, the last used first: title, digest, bytes, time of the last use.
        Those without one, of tests or of sources that are gone, come with their digest as title."""
        titles = {}
        for path in (self.folder / "configs").glob("*/*.json"):
            content = self.config(path.stem) or {}
            titles[content.get("kernel")] = _title(content.get("key", {}))
        return [
            {
                "title": titles.get(entry.path.stem, entry.path.stem),
                "digest": entry.path.stem,
                "bytes": entry.nbytes,
                "used": entry.used,
            }
            for entry in reversed(self.entries())
            if entry.path.suffix == ".kernel"
        ]

    def verify(self) -> tuple[int, list[Path]]:
        """Read everything; (files that are whole, damaged ones, which are removed). Raises
        Untrusted for a folder that others may write."""
        self._require_trusted()
        good, damaged = 0, []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CacheWarning)
            for entry in self.entries():
                read = self.kernel if entry.path.suffix == ".kernel" else self.config
                if read(entry.path.stem) is None:
                    damaged.append(entry.path)
                else:
                    good += 1
        return good, damaged

    def clear(self) -> int:
        """Remove everything; how many files that were. Raises Untrusted for a folder that others
        may write: what a link in it names is not removed."""
        self._require_trusted()
        entries = self.entries()
        for path in [*(entry.path for entry in entries), *self.folder.glob(f"*/*/{UNFINISHED}*")]:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        return len(entries)

    def _require_trusted(self) -> None:
        if self.folder.exists():
            GUARD.check(self.folder)

    def _kernel_path(self, digest: str) -> Path:
        return self.folder / "kernels" / digest[:2] / f"{digest}.kernel"

    def _config_path(self, digest: str) -> Path:
        return self.folder / "configs" / digest[:2] / f"{digest}.json"


def _title(key: Any) -> str:
    """Title of a kernel's key; only its source if other sources had another config."""
    try:
        return KernelKey.from_text(json.dumps(key)).title()
    except ValueError:
        known = isinstance(key, dict) and "source" in key
        return f"{key['source']}, of other sources" if known else ""
