"""Hooks of mkdocs: every page of the repository is a page of the site, at its own path.

Links between pages are thus the same there as in the repository. Other files that pages link to are
part of the site; source code among them and notebooks become pages. `make docs` builds the site.
"""

from __future__ import annotations

import json
import re
from pathlib import PurePosixPath
from typing import Any

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
    "Learning": (
        *("examples/notebooks/*.ipynb", "examples/*/README.md"),
        *("kernelkit/README.md", "docs/algorithms/*.md"),
    ),
    "Emulator": ("ptxemu/**/README.md", "docs/ptxemu/*.md"),
    "Engines": ("blackwell_engines/**/README.md",),
    "API reference": ("docs/api/*.md",),
    "Changing it": (
        *("CONTRIBUTING.md", "docs/architecture.md", "tests/README.md", "findings/README.md"),
        *("CHANGELOG.md", "notes/*.md"),
    ),
}
CODE = {".py": "python", ".sh": "bash"}
BECOME_PAGES = (*CODE, ".ipynb")
AS_THEY_ARE = (".png", ".svg", ".css")
NOT_SEARCHED = "notes"  # as many words as all other pages

_CODE_LINK = re.compile(
    rf"(\]\((?!\w+:)[^)#]+(?:{'|'.join(map(re.escape, BECOME_PAGES))}))(?=[)#])"
)
_LIST = re.compile(r"^((?![-*|#>\d `])\S.*)\n(?=(?:[-*]|\d+\.) )", re.MULTILINE)


def on_config(config: MkDocsConfig) -> None:
    """Sort the pages into sections."""
    kept = set(files(".md", ".ipynb"))
    section: dict[PurePosixPath, str] = {}
    for title, patterns in SECTIONS.items():
        for pattern in patterns:
            found = sorted(PurePosixPath(path.relative_to(ROOT)) for path in ROOT.glob(pattern))
            section.update((path, title) for path in found if path in kept)
    pages = {title: [_name(p) for p, at in section.items() if at == title] for title in SECTIONS}
    config.nav = [{title: found if found[1:] else found[0]} for title, found in pages.items()]


def on_files(found: Files, *, config: MkDocsConfig) -> Files:
    """Replace the files of docs/ by those of the repository."""
    for file in [file for file in found if file.src_dir == config.docs_dir]:
        found.remove(file)
    pages = files(".md")
    linked = {path for page in pages for path in _linked(page)}
    for path in sorted({*pages, *files(*AS_THEY_ARE, ".ipynb"), *linked}):
        if path.suffix in BECOME_PAGES:
            found.append(File.generated(config, _name(path), content=_page(path)))
        else:
            found.append(File.generated(config, str(path), abs_src_path=str(ROOT / path)))
    return found


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Link to the pages of source code, and begin lists after paragraphs, as GitHub does."""
    name = page.file.src_uri
    if name.startswith(NOT_SEARCHED) or name.endswith(tuple(f"{suffix}.md" for suffix in CODE)):
        page.meta["search"] = {"exclude": True}
    return _LIST.sub(r"\1\n\n", _CODE_LINK.sub(r"\1.md", markdown))


def _name(path: PurePosixPath) -> str:
    """Name of the page of a file."""
    return f"{path}.md" if path.suffix in BECOME_PAGES else str(path)


def _page(path: PurePosixPath) -> str:
    """Return source code or a notebook as Markdown."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.suffix in CODE:
        return f"# {path}\n\n``````{CODE[path.suffix]}\n{text}\n``````\n"
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
    parts = (part if kind == "markdown" else f"```python\n{part}\n```" for kind, part in cells)
    return "\n\n".join(parts)


def _linked(page: PurePosixPath) -> list[PurePosixPath]:
    """List the files, other than pages, that a page links to."""
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = [(ROOT / page.parent / name).resolve() for name in LINK.findall(text)]
    found = (PurePosixPath(target.relative_to(ROOT)) for target in targets if target.is_file())
    return [path for path in found if path.suffix != ".md"]
