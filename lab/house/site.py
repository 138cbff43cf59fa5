"""Hooks of mkdocs: every page of the repository is a page of the site, at its own path.

Links between pages are thus the same there as in the repository. Other files that pages link to
are part of the site, and source code among them becomes a page. `make docs` builds the site.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from lab.house.source import LINK, ROOT, files

FAMILIES = ("fmha", "gqa_lowlatency", "moe", "kvcache", "mla", "q8_0")
# Title of a section -> patterns of its pages; the last one that matches a page decides.
SECTIONS = {
    "Start": ("README.md",),
    "Packages": tuple(f"{name}/README.md" for name in FAMILIES),
    "Guides": ("docs/*.md", "cycle_model/README.md"),
    "Learning": ("examples/*/README.md", "kernelkit/README.md", "docs/algorithms/*.md"),
    "Emulator": ("ptxemu/**/README.md", "docs/ptxemu/*.md"),
    "Engines": ("blackwell_engines/**/README.md",),
    "API reference": ("docs/api/*.md",),
    "Changing it": (
        *("CONTRIBUTING.md", "docs/architecture.md", "tests/README.md", "findings/README.md"),
        *("CHANGELOG.md", "notes/log.md"),
    ),
}
CODE = {".py": "python", ".sh": "bash"}
AS_THEY_ARE = (".png", ".svg", ".css")
NOT_SEARCHED = "notes"  # as many words as all other pages

_CODE_LINK = re.compile(rf"(\]\((?!\w+:)[^)#]+(?:{'|'.join(map(re.escape, CODE))}))(?=[)#])")
_FIELD = re.compile(r"(\w+(?:, \w+)*): (.*)")
_LIST = re.compile(r"^((?![-*|#>\d `])\S.*)\n(?=(?:[-*]|\d+\.) )", re.MULTILINE)


def on_config(config: MkDocsConfig) -> None:
    """Sort the pages into sections."""
    kept = set(files(".md"))
    section: dict[PurePosixPath, str] = {}
    for title, patterns in SECTIONS.items():
        for pattern in patterns:
            found = sorted(PurePosixPath(path.relative_to(ROOT)) for path in ROOT.glob(pattern))
            section.update((path, title) for path in found if path in kept)
    pages = {title: [str(p) for p, at in section.items() if at == title] for title in SECTIONS}
    config.nav = [{title: found if found[1:] else found[0]} for title, found in pages.items()]


def on_files(found: Files, *, config: MkDocsConfig) -> Files:
    """Replace the files of docs/ by those of the repository."""
    for file in [file for file in found if file.src_dir == config.docs_dir]:
        found.remove(file)
    pages = files(".md")
    linked = {path for page in pages for path in _linked(page)}
    for path in sorted({*pages, *files(*AS_THEY_ARE), *linked}):
        if path.suffix in CODE:
            text = (ROOT / path).read_text(encoding="utf-8")
            page = f"# {path}\n\n``````{CODE[path.suffix]}\n{text}\n``````\n"
            found.append(File.generated(config, f"{path}.md", content=page))
        else:
            found.append(File.generated(config, str(path), abs_src_path=str(ROOT / path)))
    return found


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Link to the pages of source code, and begin lists after paragraphs, as GitHub does."""
    if page.file.src_uri.startswith(NOT_SEARCHED):
        page.meta["search"] = {"exclude": True}
    return _LIST.sub(r"\1\n\n", _CODE_LINK.sub(r"\1.md", markdown))


def _linked(page: PurePosixPath) -> list[PurePosixPath]:
    """List the files, other than pages, that a page links to."""
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = [(ROOT / page.parent / name).resolve() for name in LINK.findall(text)]
    found = (PurePosixPath(target.relative_to(ROOT)) for target in targets if target.is_file())
    return [path for path in found if path.suffix != ".md"]


class Docstrings(griffe.Extension):
    """Reads the docstrings of this repository for the API pages."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Show functions before classes."""
        if pkg.exports:
            pkg.exports.sort(key=lambda name: str(name)[0].isupper())

    def on_function(self, *, func: griffe.Function, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Spell out the keyword arguments of a function with overloads, as `help` does."""
        parameters = [new for old in func.parameters for new in _spelled(old, loader)]
        if len(parameters) > len(func.parameters):
            func.overloads, func.parameters = None, griffe.Parameters(*parameters)

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Show the whole first paragraph in tables of members.

        Fields that a class documents as `name: text` or `name, name: text` get docstrings.
        """
        if not obj.docstring:
            return
        first, *others = obj.docstring.value.split("\n\n")
        if obj.is_class:
            first, *others = (_without_fields(obj, part) for part in (first, *others))
        obj.docstring.value = "\n\n".join((" ".join(first.split()), *others)).strip()


def _spelled(
    parameter: griffe.Parameter, loader: griffe.GriffeLoader
) -> Iterator[griffe.Parameter]:
    """Yield the parameter, or one for each item of the TypedDict in `**options: Unpack[..]`.

    Its items are annotated with `Annotated[type, default]`, see `kernelkit.call.front`.
    """
    unpack = parameter.annotation
    if not isinstance(unpack, griffe.ExprSubscript) or unpack.canonical_name != "Unpack":
        yield parameter
        return
    options = loader.modules_collection[unpack.slice.canonical_path]
    for name, item in options.all_members.items():
        kind, default = item.annotation.slice.elements
        only = griffe.ParameterKind.keyword_only
        yield griffe.Parameter(name, annotation=kind, kind=only, default=default)


def _without_fields(obj: griffe.Object, paragraph: str) -> str:
    """Give the fields in the paragraph their docstrings; return what else it has."""
    kept, fields = [], {}
    names: list[str] = []
    for line in paragraph.splitlines():
        if found := _FIELD.match(line):
            names = [name for name in found[1].split(", ") if name in obj.members]
            line = found[2] if names else line
        elif not line.startswith("    "):
            names = []
        for name in names:
            fields.setdefault(name, []).append(line.strip())
        kept += [] if names else [line]
    for name, lines in fields.items():
        obj.members[name].docstring = griffe.Docstring(" ".join(lines), parent=obj.members[name])
    return "\n".join(kept)
