"""What report.py does: draws the pictures, writes the page, brings docs/ up to date."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lab.report.documents import RESULTS, read
from lab.report.page import html, picture_of
from lab.report.sections import Section, named
from lab.tools.common import refuse

DOCS = RESULTS.parent / "docs"
PAGE = "index.html"


def perform(options: argparse.Namespace) -> int:
    """Returns the exit code."""
    try:
        sections = named(options.only)
    except ValueError as error:
        return refuse(error)
    if options.list:
        for section in sections:
            print(f"{section.name:18} {section.docs or '-':24} {section.title}")
        return 0
    if options.docs:
        for path in drawn([section for section in sections if section.docs], DOCS):
            print(f"wrote {path}")
        return 0
    for path in drawn(sections, options.out):
        print(f"wrote {path}")
    page = options.out / PAGE
    page.write_text(html(sections), encoding="utf-8")
    print(f"wrote {page}")
    return 0


def drawn(sections: Sequence[Section], folder: Path) -> list[Path]:
    """The PNGs of these sections, written to `folder`."""
    written = []
    folder.mkdir(parents=True, exist_ok=True)
    for section in sections:
        if section.draw:
            documents = [read(name) for name in section.files]
            path = folder / picture_of(section)
            section.draw(path, documents, section.source(documents))
            written.append(path)
    return written
