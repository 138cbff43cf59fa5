"""The Markdown pages: links to headings lead somewhere, and the log's index names every entry."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from workbench.house.source import ROOT, files

HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)#([^)\s]+)\)")
LOG = PurePosixPath("notes/log.md")


def anchor(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def headings(path: PurePosixPath) -> list[str]:
    text = (ROOT / path).read_text(encoding="utf-8")
    return HEADING.findall(re.sub(r"^(```|    ).*$", "", text, flags=re.MULTILINE))


def test_links_to_headings_lead_somewhere():
    lost = []
    for path in files(".md"):
        for page, name in LINK.findall((ROOT / path).read_text(encoding="utf-8")):
            target = path.parent / page if page else path
            if name not in map(anchor, headings(target)):
                lost.append(f"{path}: {page}#{name}")
    assert not lost


def test_the_index_of_the_log_names_every_entry_once():
    entries = [anchor(heading) for heading in headings(LOG) if heading[:2] == "20"]
    indexed = [name for _, name in LINK.findall((ROOT / LOG).read_text(encoding="utf-8"))]
    assert len(entries) == len(set(entries))
    assert sorted(entries) == sorted(indexed)
