"""The page: sections with their pictures and tables, as HTML that needs nothing but its PNGs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.report.commands_of import COMMANDS, OTHERS
from lab.report.documents import RESULTS, Document, read
from lab.report.figures import tables_of
from lab.report.sections import Section
from lab.tools.tables import Table

TEMPLATES = Path(__file__).parent
FEW = 24  # rows of a table that is shown at once


@dataclass(frozen=True)
class File:
    """Of a section: the document, what kind of figures it has, its command, its tables."""

    document: Document
    kind: str
    command: str
    tables: Sequence[Table]


@dataclass(frozen=True)
class Shown:
    """A section of the page; picture: the name of its PNG, nothing without one."""

    section: Section
    picture: str
    files: Sequence[File]


def shown(section: Section, earlier: set[str], folder: Path = RESULTS) -> Shown:
    """With tables of its files; of those that `earlier` sections had, none again."""
    files = []
    for name in section.files:
        if name not in earlier:
            document, command = read(name, folder), COMMANDS[name]
            files.append(File(document, kind_of(name), command, tables_of(document)))
    return Shown(section, picture_of(section), files)


def kind_of(name: str) -> str:
    """measured, modelled, published, or of a machine without a GPU: counted."""
    if COMMANDS[name] == OTHERS:
        return "published"
    modelled = name.startswith("model_b200") or name == "moe_tiles_b200.json"
    counted = name.endswith("_static.json") or name == "test_coverage.json"
    return "modelled" if modelled else "counted" if counted else "measured"


def picture_of(section: Section) -> str:
    """The name of its PNG: that of docs/, where it is shown there."""
    return section.docs or f"{section.name}.png" if section.draw else ""


def html(sections: Sequence[Section], folder: Path = RESULTS) -> str:
    """The page."""
    earlier: set[str] = set()
    found = []
    for section in sections:
        found.append(shown(section, earlier, folder))
        earlier |= {*section.files}
    return rendered(TEMPLATES / "page.html", sections=found, few=FEW)


def rendered(template: Path, **data: object) -> str:
    """A template, which may use those that are here. All that it is given is data, and nothing in
    that is HTML."""
    from jinja2 import Environment, FileSystemLoader

    folders = FileSystemLoader([template.parent, TEMPLATES], encoding="utf-8")
    environment = Environment(autoescape=True, loader=folders, keep_trailing_newline=True)
    return environment.get_template(template.name).render(**data)
