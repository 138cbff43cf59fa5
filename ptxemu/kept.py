"""Cache of results about a PTX text, in a folder for later processes: tree, analysis, blocks.

    <first two digits>/<digest of the text, what it is, and what decides it>

The digest covers all sources of the emulator and the versions of Python and numpy, so that stale
entries are never found. A file appears whole, by renaming, and begins with the digest of its
content: a damaged one counts as missing. Reading makes plain objects and runs nothing
(`ptxemu.plain`). Generated blocks, however, are code, as a compiled module of Python is. A folder
or a file that other users may write is therefore not used (`ptxemu.trusted`), and a warning names
it. The least recently used entries are removed when the cache is too large.

The folder is `ptxemu/programs` in the user's cache folder. `PTXEMU_CACHE` names another folder, or
is `off` for none.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import sys
import time
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ptxemu.codegen.analysis import Analysis
from ptxemu.codegen.program import Written
from ptxemu.codegen.values import RegisterFile
from ptxemu.guard import GUARD, warn
from ptxemu.native.frame import Plan
from ptxemu.plain import Codec, NotPlain
from ptxemu.syntax.tree import (
    Addr,
    Args,
    Entry,
    Imm,
    Instr,
    Location,
    ModuleTree,
    Not,
    Pair,
    Reg,
    Special,
    Sym,
    Variable,
    Vec,
)
from ptxemu.trusted import UNFINISHED, write_whole

FOLDER = "PTXEMU_CACHE"  # environment variable: where to
OFF = ("off", "0", "no")
LIMIT = 256 << 20  # bytes of the folder
_SHORT = 4096  # letters: less is read anew in the time that a file takes
_SELDOM = 3600  # seconds after which a use is noted anew
_BETWEEN_LOOKS = 32  # files written between two looks at the size of the folder
_FILES = "[0-9a-f]" * 2 + "/" + "[0-9a-f]" * 62
_DRAFTS = f"{'[0-9a-f]' * 2}/{UNFINISHED}*-{'[0-9a-f]' * 62}"
_DIGEST = hashlib.sha256().digest_size
# Classes of what is kept.
_OPERANDS = (Reg, Special, Imm, Sym, Not, Vec, Pair, Addr, Args)
_TREE = (ModuleTree, Entry, Variable, Instr, Location, *_OPERANDS)
_CODEC = Codec((*_TREE, Analysis, RegisterFile, Written, Plan))
_STARTED = time.time()
_writes = itertools.count()


class Kept:
    """Cached results for one text."""

    def __init__(self, folder: Path, text: str, sources: bytes) -> None:
        self._folder = folder
        self._base = hashlib.sha256(sources + text.encode("utf-8", "surrogatepass"))

    def _path(self, part: str) -> Path:
        base = self._base.copy()
        base.update(b"\0" + part.encode("utf-8", "surrogatepass"))
        name = base.hexdigest()
        return self._folder / name[:2] / name[2:]

    def get(self, part: str) -> Any:
        """Return the value stored by `put` under that name in any process, or None if unusable."""
        try:
            data = _content(self._path(part))
            if data[:_DIGEST] != hashlib.sha256(data[_DIGEST:]).digest():
                return None
            return _CODEC.loads(zlib.decompressobj().decompress(data[_DIGEST:], LIMIT))
        except OSError as error:
            warn(error)
            return None
        except (zlib.error, ValueError):
            return None

    def put(self, part: str, value: Any) -> None:
        """Keep it; without a word where the folder cannot be written, or the value not be kept."""
        path = self._path(part)
        try:
            content = zlib.compress(_CODEC.dumps(value), 1)
            GUARD.make(path.parent)
            write_whole(path, hashlib.sha256(content).digest() + content)
            if next(_writes) % _BETWEEN_LOOKS == 0:
                evict(self._folder, LIMIT)
        except OSError as error:
            warn(error)
        except (RecursionError, NotPlain):
            return


def kept(text: str) -> Kept | None:
    """Return the cache of a text, or None if nothing is to be kept.

    Reasons are a short text, a disabled folder, or sources changed since this process read them.
    """
    named = os.environ.get(FOLDER, "")
    if len(text) < _SHORT or named.lower() in OFF:
        return None
    sources, folder = _sources(), _folder(named)
    return Kept(folder, text, sources) if sources and folder else None


def _folder(named: str) -> Path | None:
    """Return the cache folder; None for a user without a home."""
    try:
        if named:
            return Path(named).expanduser()
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(home) / "ptxemu" / "programs"


@cache
def _sources() -> bytes:
    """Return a digest of all that decides the results except the text.

    It is empty if a source is newer than this process or cannot be read.
    """
    found = hashlib.sha256(f"{sys.version} {np.__version__}".encode())
    root = Path(__file__).parent
    try:
        for path in sorted(root.rglob("*.py")):
            if path.stat().st_mtime > _STARTED:
                return b""
            content = path.read_bytes()
            found.update(f"\0{path.relative_to(root)} {len(content)}\0".encode() + content)
    except OSError:
        return b""
    return found.digest()


def _content(path: Path) -> bytes:
    """Return the bytes of a file that no other user can have written; else raise OSError."""
    data = GUARD.read(path)
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime > _SELDOM:
            os.utime(path)
    return data


def evict(folder: Path, limit: int) -> None:
    """Remove what was used least recently until there are at most `limit` bytes, and drafts of
    processes that have died."""
    found = []
    for path in folder.glob(_FILES):
        with contextlib.suppress(OSError):
            status = path.stat()
            found.append((status.st_mtime, status.st_size, path))
    for path in folder.glob(_DRAFTS):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _SELDOM:
                path.unlink()
    excess = sum(size for _, size, _ in found) - limit
    for _, size, path in sorted(found):
        if excess <= 0:
            break
        with contextlib.suppress(OSError):
            path.unlink()
            excess -= size
