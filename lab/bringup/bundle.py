"""One archive of a bring-up to send: document, page, pictures, logs and figures, without names.

Paths of this machine, its name, its kernel's and that of its user are replaced in every text; what
is no text, or larger than MOST_BYTES, stays here.
"""

from __future__ import annotations

import getpass
import io
import os
import platform
import re
import socket
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from lab.bringup.session import Session
from lab.house.source import ROOT

TEXTS = (".json", ".log", ".html", ".csv", ".record")
PICTURES = (".png",)
MOST_BYTES = 16 << 20


def pack(session: Session, document: dict[str, Any]) -> Path:
    """Write the archive beside the document; the path."""
    hide = Hider()
    path = session.folder / f"{name_of(document)}.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for file in files_of(session.folder):
            data = file.read_bytes()
            if file.suffix in TEXTS:
                data = hide(data.decode("utf-8", errors="replace")).encode()
            entry = tarfile.TarInfo(f"{name_of(document)}/{file.relative_to(session.folder)}")
            entry.size = len(data)  # owner, group and time stay 0
            archive.addfile(entry, io.BytesIO(data))
    return path


def files_of(folder: Path) -> Iterator[Path]:
    """What goes into the archive."""
    for path in sorted(folder.rglob("*")):
        if path.suffix in (*TEXTS, *PICTURES) and path.stat().st_size <= MOST_BYTES:
            yield path


def name_of(document: dict[str, Any]) -> str:
    """bringup-NVIDIA_B200-2026-12-24."""
    gpu = re.sub(r"\W+", "_", document["gpu"]["name"]).strip("_")
    if document.get("emulated"):
        gpu = f"{document['arch']}_{gpu}"
    return f"bringup-{gpu}-{document['date']}"


class Hider:
    """Replaces names of this machine in a text, the longest first."""

    def __init__(self) -> None:
        names = {str(ROOT): "REPOSITORY", os.path.realpath(ROOT): "REPOSITORY",
                 str(Path.home()): "HOME", tempfile.gettempdir(): "TMP",
                 socket.gethostname(): "HOST", platform.release(): "KERNEL"}  # fmt: skip
        with suppress(Exception):  # no entry of the user's number
            names[getpass.getuser()] = "USER"
        for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
            if value := os.environ.get(variable):
                names[value] = variable
        self.names = {name: word for name, word in names.items() if len(name) > 2}

    def __call__(self, text: str) -> str:
        for name in sorted(self.names, key=len, reverse=True):
            pattern = re.escape(name)
            if "/" not in name:  # a word, no part of another one
                pattern = rf"(?<![\w]){pattern}(?![\w])"
            text = re.sub(pattern, self.names[name], text)
        # What else is a path of a user, such as one in a log of another machine's compiler.
        return re.sub(r"/(home|Users)/[^/\s\"']+", r"/\1/USER", text)
