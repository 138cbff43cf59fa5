"""Kernels compiled ahead of time: a folder of artefacts and a manifest, for processes without the
DSL, and the record of a run that says which kernels to put there.

    manifest.json    format, versions of the compiler, and for each kernel its key, its file, and a
                     digest of each source file that it is traced from
    *.kernel         `kernelkit.artifact.Artifact`

A folder is loaded by `load(folder)` or named in BLACKWELL_KERNELS_AOT, several separated by colons.
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
from pathlib import Path
from typing import Any

from kernelkit import sources
from kernelkit.arch import written_for
from kernelkit.artifact import Artifact, ArtifactError
from kernelkit.keys import KernelKey, NotPlain

VARIABLE = "BLACKWELL_KERNELS_AOT"
RECORD_VARIABLE = "BLACKWELL_KERNELS_RECORD"
FORMAT = 1
MANIFEST = "manifest.json"


class AotError(RuntimeError):
    """A folder of artefacts that does not fit this installation, or is damaged."""


@dataclass(frozen=True)
class _Ready:
    """A kernel of a folder, read when it is first asked for."""

    path: Path
    sha256: str

    def read(self) -> Artifact:
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise AotError(f"{self.path}: {error.strerror}") from error
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


def load(folder: str | Path) -> int:
    """Use the artefacts of a folder in this process.

    Args:
        folder: as `python -m kernelkit aot` wrote it.

    Returns:
        How many they are.

    Raises:
        AotError: for a folder without a manifest, one of another format, and one whose kernels
            were traced from other sources than those installed here: it names the files that
            differ.
    """
    manifest = read_manifest(Path(folder))
    changed = changed_sources(manifest)
    if changed:
        raise AotError(
            f"{folder} was compiled from other sources: {', '.join(changed)} differ; make it again "
            "with python -m kernelkit aot"
        )
    for item in manifest["kernels"]:
        key = json.dumps(item["key"], sort_keys=True)
        _ready[key] = _Ready(Path(folder) / item["file"], item["sha256"])
    return len(manifest["kernels"])


def read_manifest(folder: Path) -> dict[str, Any]:
    """What a folder holds. AotError where it has no manifest that this version reads."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        given = manifest["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AotError(f"{folder} has no readable {MANIFEST}: {error}") from error
    if given != FORMAT:
        raise AotError(f"{folder} has format {given}, this version reads {FORMAT}")
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
                load(folder)
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
    lines = Path(path).read_text(encoding="utf-8").splitlines()
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
    """As a run would note them; for what `collecting` or the `kernels_for` of a warm-up names."""
    Path(path).write_text("".join(key.to_text() + "\n" for key in keys), encoding="utf-8")


# ---- making


def write(
    folder: Path, kernels: Iterable[tuple[KernelKey, Artifact]], toolchain: dict[str, str]
) -> int:
    """Fill a folder, the manifest last, without which it is none; how many kernels there are."""
    folder.mkdir(parents=True, exist_ok=True)
    items = [_written(folder, key, artifact) for key, artifact in kernels]
    manifest = {"format": FORMAT, "toolchain": toolchain, "kernels": items}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return len(items)


def _written(folder: Path, key: KernelKey, artifact: Artifact) -> dict[str, Any]:
    """What the manifest says of a kernel, whose file is there now."""
    data = artifact.to_bytes()
    digest = hashlib.sha256(data).hexdigest()
    file = f"{re.sub(r'[^a-zA-Z0-9_]+', '_', f'{key.source}_{key.arch}')}_{digest[:12]}.kernel"
    (folder / file).write_bytes(data)
    return {
        "key": json.loads(key.to_text()),
        "title": key.title(),
        "file": file,
        "sha256": digest,
        "sources": {module: _digest_of(module) for module in sources.closure(key.module)},
    }


def for_archs(keys: Iterable[KernelKey], archs: Sequence[str]) -> list[KernelKey]:
    """Each kernel for each of these architectures, each once; what is written for one architecture
    alone, in a folder of its name, only for that, and for the one that it was asked for: a GPU that
    takes it all the same has configs of its own."""
    found: dict[KernelKey, None] = {}
    for key in keys:
        own = next((part for part in key.source.split(".") if part in _FOLDERS), None)
        for arch in archs:
            if own is None or _FOLDERS[own] == written_for(arch) or arch == key.arch:
                found[KernelKey(key.source, key.config, arch)] = None
    return list(found)


_FOLDERS = {"sm90": "sm_90a", "sm100": "sm_100a"}  # of kernels for one architecture
