"""The document of a bring-up as a file, and as a page with pictures."""

from __future__ import annotations

import getpass
import io
import json
import os
import platform
import re
import socket
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lab.bringup.session import BAD, Session
from lab.house.source import ROOT
from lab.report import attention
from lab.report import steps as overview
from lab.report.documents import Document, read
from lab.report.figures import tables_of
from lab.report.perform import rendered
from lab.tools.bringup_words import GROUPS

TEMPLATE = Path(__file__).with_name("page.html")
# Step -> what draws its figures.
DRAWN: dict[str, Callable[[Path, Document], None]] = {
    **dict.fromkeys(("speed.gqa", "speed.gqa-peers"), attention.draw_decode),
    **dict.fromkeys(("speed.fmha", "speed.fmha-peers"), attention.draw_any),
}


@contextmanager
def _without(what: str) -> Iterator[None]:
    """Go on without it, and say so: the file matters more than how it looks."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  whatever it is, figures nobody has seen before cause it
        print(f"without {what}: {type(error).__name__}: {error}", file=sys.stderr)


def save(document: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write both, and the pictures; the paths of the document and of the page."""
    name = name_of({**document})
    file, page = folder / f"{name}.json", folder / f"{name}.html"
    file.write_text(_lines(document), encoding="utf-8")
    with _without("overview.png"):
        overview.draw_bringup(folder / "overview.png", document)
    pictures = {group: pictures_of(group, document["steps"], folder) for group in GROUPS}
    page.write_text(html(document, pictures, folder), encoding="utf-8")
    return [file, page]


def _lines(document: Mapping[str, Any]) -> str:
    """JSON, a line per step."""
    head = json.dumps({key: each for key, each in document.items() if key != "steps"})
    steps = ",\n".join(map(json.dumps, document["steps"]))
    return f'{head[:-1]}, "steps": [\n{steps}\n]}}\n'


def html(document: Mapping[str, Any], pictures: Mapping[str, Sequence[str]], folder: Path) -> str:
    """The page."""
    steps = document["steps"]
    groups = [(group, words, [row for row in steps if row["group"] == group])
              for group, words in GROUPS.items()]  # fmt: skip
    figures = {group: [*_tables(rows, folder)] for group, _, rows in groups}
    return rendered(
        TEMPLATE, head=document, summary=overview.summary_of(steps), groups=groups,
        pictures=pictures, figures=figures, bad=BAD,
    )  # fmt: skip


def pictures_of(group: str, steps: Sequence[Mapping[str, Any]], folder: Path) -> list[str]:
    """Draw what can be drawn of a group, and name it with what its steps have drawn themselves."""
    found = []
    for row in steps:
        if row["group"] != group or row["verdict"] != "passed":
            continue
        path = folder / f"{row['name']}.png"
        if row["name"] in DRAWN:
            document = _document(row["name"], folder)
            if document is None:
                continue
            with _without(path.name):
                DRAWN[row["name"]](path, document)
        if path.exists():
            found.append(path.name)
    return found


def _tables(rows: Sequence[Mapping[str, Any]], folder: Path) -> Any:
    for row in rows:
        document = _document(row["name"], folder)
        if document is not None and row["figures"] is not None:
            with _without(f"a table of {row['name']}"):
                yield row["name"], tables_of(document)


def _document(name: str, folder: Path) -> Document | None:
    """Document of a step's figures; None without, or where they are of no kind that is known."""
    try:
        return read(f"{name}.json", folder)
    except (OSError, ValueError, AttributeError):
        return None


# One archive of a bring-up to send: document, page, pictures, logs and figures, without names.
#
# Paths of this machine, its name, its kernel's and that of its user are replaced in every text;
# what is no text, or larger than MOST_BYTES, stays here.


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
    """Yield the files that go into the archive."""
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
