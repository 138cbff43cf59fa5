"""The examples of README.md and of the packages' READMEs, as files that name page and line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from lab.house.source import PACKAGES, ROOT, files

_PYTHON = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# (page, which of its examples) -> why it does not run in the smoke test; tests run it.
LEFT_OUT = {
    ("blackwell_engines/README.md", 1): "transformers, which no user has to have",
    ("blackwell_engines/README.md", 2): "the same",
    ("q8_0/README.md", 2): "a model's file",
}


@dataclass(frozen=True)
class Example:
    """Python of a page. line: of the page, where its first line stands."""

    page: PurePosixPath
    line: int
    text: str

    def write(self, folder: Path) -> Path:
        """As a file of `folder` with the same numbers of lines as the page. No example can import
        it by mistake: its name is none of Python's."""
        path = folder / f"{str(self.page).replace('/', '-')}-line-{self.line}.py"
        path.write_text("\n" * (self.line - 1) + self.text, encoding="utf-8")
        return path


def examples() -> Iterator[Example]:
    """All but those left out, page by page."""
    for page in files(".md"):
        if page.name == "README.md" and page.parts[0] in {*PACKAGES, "README.md"}:
            text = (ROOT / page).read_text(encoding="utf-8")
            for number, match in enumerate(_PYTHON.finditer(text), start=1):
                if (str(page), number) not in LEFT_OUT:
                    line = text.count("\n", 0, match.start(1)) + 1
                    yield Example(page, line, match[1])
