"""The document of a bring-up as a file, and as a page with pictures."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lab.bringup.bundle import name_of
from lab.bringup.session import BAD
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
