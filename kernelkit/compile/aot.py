"""Kernels compiled ahead of time: a folder of artefacts and a manifest, for processes without the
DSL, and the record of a run that says which kernels to put there.

    manifest.json    format, versions of the compiler, and for each kernel its key, its file, and a
                     digest of each source file that it is traced from
    *.kernel         `kernelkit.compile.artifact.Artifact`

A folder is loaded by `load(folder)` or named in BLACKWELL_KERNELS_AOT, several separated by colons,
each as FOLDER or as FOLDER@DIGEST. Its kernels are executed, so either the folder has the digest
that the caller names, or nobody else may write it (`kernelkit.compile.trusted`).

A run writes its record to the file that BLACKWELL_KERNELS_RECORD names, a key to a line.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from kernelkit.compile import sources
from kernelkit.compile.arch import written_for
from kernelkit.compile.artifact import Artifact, ArtifactError
from kernelkit.compile.keys import KernelKey, NotPlain
from kernelkit.compile.outside import json_of, read_bounded, require_fields
from kernelkit.compile.store import GUARD, SHARED_VARIABLE
from kernelkit.compile.trusted import Untrusted, write_whole

VARIABLE = "BLACKWELL_KERNELS_AOT"
RECORD_VARIABLE = "BLACKWELL_KERNELS_RECORD"
FORMAT = 1
MANIFEST = "manifest.json"


# What an entry of the manifest has to have, and of which type.
_FIELDS = {"key": dict, "title": str, "file": str, "sha256": str, "sources": dict}
_NAMED = re.compile(r"(.+)@([0-9a-f]{64})")  # a folder with its digest


class AotError(RuntimeError):
    """A folder of artefacts that does not fit this installation, is damaged, or may be written by
    others."""


@dataclass(frozen=True)
class _Ready:
    """A kernel of a folder, read when it is first asked for. trust: whoever may write the file, as
    its manifest has the digest that the caller named, or the caller shares the folder."""

    path: Path
    sha256: str
    trust: bool = False

    def read(self) -> Artifact:
        data = _content(self.path, self.trust)
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise AotError(f"{self.path} is not the file that the manifest names (sha256 differs)")
        try:
            return Artifact.from_bytes(data)
        except ArtifactError as error:
            raise AotError(f"{self.path} is {error}") from error


_ready: dict[str, _Ready] = {}
_folders_read: set[str] = set()
_lock = threading.Lock()


# ---- using


def load(folder: str | Path, *, digest: str | None = None, trust: bool = False) -> int:
    """Use the artefacts of a folder in this process.

    Args:
        folder: as `python -m kernelkit aot` wrote it.
        digest: the SHA-256 of its manifest in hex, which that command and `python -m kernelkit
            show` print. The manifest has the digest of each kernel, so nothing else is executed,
            whoever may write the folder.
        trust: use the folder although other users may write it; BLACKWELL_KERNELS_SHARED does the
            same.

    Returns:
        How many they are.

    Raises:
        AotError: for a folder without a manifest, one of another format, and one whose kernels
            were traced from other sources than those installed here: it names the files that
            differ. Also for another digest, and without one for a folder that others may write.
    """
    data = _content(Path(folder) / MANIFEST, trust or digest is not None)
    if digest is not None and digest_of(data) != digest:
        raise AotError(f"{folder} has digest {digest_of(data)}, expected {digest}")
    manifest = _manifest(Path(folder), data)
    changed = changed_sources(manifest)
    if changed:
        raise AotError(
            f"{folder} was compiled from other sources: {', '.join(changed)} differ; rebuild it "
            "with python -m kernelkit aot"
        )
    for item in manifest["kernels"]:
        key = json.dumps(item["key"], sort_keys=True)
        path = Path(folder) / item["file"]
        _ready[key] = _Ready(path, item["sha256"], trust or digest is not None)
    return len(manifest["kernels"])


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a folder, whoever wrote it. AotError if none is readable."""
    return _manifest(folder, _content(folder / MANIFEST, trust=True))


def digest_of(manifest: bytes | Path) -> str:
    """The digest of a folder, as `load` takes it: of the bytes of its manifest."""
    data = manifest if isinstance(manifest, bytes) else _content(manifest / MANIFEST, trust=True)
    return hashlib.sha256(data).hexdigest()


def _content(path: Path, trust: bool) -> bytes:
    try:
        return GUARD.read(path, trust=trust)
    except Untrusted as error:
        name = f"load(..., trust=True), a digest or {SHARED_VARIABLE}"
        raise AotError(f"{path} is not used: {error}. ({name} allows it.)") from error
    except OSError as error:
        if path.name == MANIFEST:
            raise AotError(f"{path.parent} has no readable {MANIFEST}: {error}") from error
        raise AotError(f"{path}: {error.strerror}") from error


def _manifest(folder: Path, data: bytes) -> dict[str, Any]:
    try:
        manifest = json_of(data, MANIFEST)
        given = manifest["format"]
        if given != FORMAT:
            raise AotError(f"{folder} has format {given}, this version reads {FORMAT}")
        require_fields(MANIFEST, manifest, {"toolchain": dict, "kernels": list})
        for item in manifest["kernels"]:
            require_fields(MANIFEST, item, _FIELDS)
            if Path(item["file"]).name != item["file"]:
                raise ValueError(f"file is {item['file']!r}, expected a name in the folder")
    except (ValueError, KeyError, TypeError) as error:
        raise AotError(f"{folder} has no readable {MANIFEST}: {error}") from error
    return manifest


def changed_sources(manifest: dict[str, Any]) -> list[str]:
    """Modules whose files say something else than they did, or are gone."""
    then = {m: digest for item in manifest["kernels"] for m, digest in item["sources"].items()}
    return sorted(module for module, digest in then.items() if _digest_of(module) != digest)


@cache
def _digest_of(module: str) -> str:
    path = sources.path_of(module)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path else ""


def artefact_for(key: KernelKey) -> Artifact | None:
    """The artefact of a kernel in the folders that are loaded or named by the environment."""
    named = os.environ.get(VARIABLE, "")
    with _lock:
        for folder in filter(None, named.split(os.pathsep)):
            if folder not in _folders_read:
                match = _NAMED.fullmatch(folder)
                load(match[1], digest=match[2]) if match else load(folder)
                _folders_read.add(folder)
    if not _ready:
        return None
    try:
        ready = _ready.get(key.to_text())
    except NotPlain:
        return None
    return ready.read() if ready else None


# ---- recording a run


def note(key: KernelKey) -> None:
    """Add a kernel to the record of this run, if one is wished for."""
    file = os.environ.get(RECORD_VARIABLE)
    if file:
        _note_once(file, key)


@cache
def _note_once(file: str, key: KernelKey) -> None:
    try:
        text = key.to_text()
    except NotPlain:  # a kernel of a test or an experiment
        return
    with open(file, "a", encoding="utf-8") as record:
        record.write(text + "\n")


def read_record(path: str | Path) -> list[KernelKey]:
    """The kernels of a record, each once, in order. ValueError names the line that is none."""
    found: dict[str, KernelKey] = {}
    try:
        lines = read_bounded(path).decode().splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            key = KernelKey.from_text(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        found[key.to_text()] = key
    return list(found.values())


def write_record(path: str | Path, keys: Iterable[KernelKey]) -> None:
    """Write keys, from `collecting` or a warm-up's `kernels_for`, as a run would record them."""
    Path(path).write_text("".join(key.to_text() + "\n" for key in keys), encoding="utf-8")


# ---- making


def write(
    folder: Path, kernels: Iterable[tuple[KernelKey, Artifact]], toolchain: dict[str, str]
) -> int:
    """Fill a folder, the manifest last, without which it is none; how many kernels there are."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o755)  # for others to read
    items = [_written(folder, key, artifact) for key, artifact in kernels]
    manifest = {"format": FORMAT, "toolchain": toolchain, "kernels": items}
    write_whole(folder / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
    return len(items)


def _written(folder: Path, key: KernelKey, artifact: Artifact) -> dict[str, Any]:
    """Write a kernel's file and return its entry of the manifest."""
    data = artifact.to_bytes()
    digest = hashlib.sha256(data).hexdigest()
    file = f"{re.sub(r'[^a-zA-Z0-9_]+', '_', f'{key.source}_{key.arch}')}_{digest[:12]}.kernel"
    write_whole(folder / file, data)
    return {
        "key": json.loads(key.to_text()),
        "title": key.title(),
        "file": file,
        "sha256": digest,
        "sources": {module: _digest_of(module) for module in sources.closure(key.module)},
    }


def for_archs(keys: Iterable[KernelKey], archs: Sequence[str]) -> list[KernelKey]:
    """Each kernel for each of these architectures that it serves, and for the one that it was asked
    for: a GPU that takes it all the same has configs of its own. Each once."""
    found: dict[KernelKey, None] = {}
    for key in keys:
        for arch in archs:
            if arch == key.arch or serves(key.module, arch):
                found[KernelKey(key.source, key.config, arch)] = None
    return list(found)


def serves(module: str, arch: str) -> bool:
    """Whether the kernel of a module is one of an architecture.

    What stands in a folder of an architecture's name is for that alone, and what stands in a
    package with a constant WRITTEN_FOR for the one that it names.
    """
    *folders, _ = module.split(".")
    own = next((_FOLDERS[folder] for folder in folders if folder in _FOLDERS), None)
    own = own or getattr(import_module(".".join(folders)), "WRITTEN_FOR", None)
    return own in (None, written_for(arch))


_FOLDERS = {"sm90": "sm_90a", "sm100": "sm_100a"}  # of kernels for one architecture
