"""Rules about the repository as a whole: its prose, its links, a matrix per kernel."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from lab.house.size import MARKDOWN_COLUMNS, PACKAGE_README_LINES
from lab.house.source import PACKAGES, ROOT, Finding, Source
from lab.house.tiers import MATRIX, TABLE, table

PROGRAMS = PurePosixPath("tests/ptxemu/ptx")
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:home|work|root|Users|opt|mnt)/[\w.]")
LINK = re.compile(r"\]\((?!\w+:|#)([^)#]+)")


def no_machine_paths(path: PurePosixPath, text: str) -> Iterator[Finding]:
    """A path of somebody's machine means nothing on another."""
    for number, line in enumerate(text.splitlines(), start=1):
        if MACHINE_PATH.search(line):
            yield Finding(str(path), number, f"names a path of one machine: {line.strip()[:60]}")


def no_dumps(path: PurePosixPath, text: str) -> Iterator[Finding]:
    """What a compiler or a run left behind is no source; tests of ptxemu keep programs in PTX."""
    if not path.is_relative_to(PROGRAMS):
        yield Finding(str(path), 1, f"a generated file, {len(text)} characters")


def links_resolve(path: PurePosixPath, text: str) -> Iterator[Finding]:
    """A relative link of a Markdown file leads to a file that is there."""
    for number, line in enumerate(text.splitlines(), start=1):
        for target in LINK.findall(line):
            if not (ROOT / path.parent / target).exists():
                yield Finding(str(path), number, f"links to {target}, which does not exist")


def markdown_line_length(path: PurePosixPath, text: str) -> Iterator[Finding]:
    """Prose is read in editors and diffs, too; tables, code and links have the length they need."""
    fenced = False
    for number, line in enumerate(text.splitlines(), start=1):
        fenced ^= line.startswith("```")
        free = fenced or line.startswith(("|", "    ")) or not line.strip().count(" ")
        if len(line) > MARKDOWN_COLUMNS and not free:
            message = f"{len(line)} characters, the limit is {MARKDOWN_COLUMNS}"
            yield Finding(str(path), number, message)


def package_readme_length(path: PurePosixPath, text: str) -> Iterator[Finding]:
    """The page of a package is one page."""
    lines = len(text.splitlines())
    in_package = path.parts[0] in PACKAGES and path.name == "README.md"
    if in_package and lines > PACKAGE_README_LINES:
        yield Finding(str(path), 1, f"{lines} lines, the limit is {PACKAGE_README_LINES}")


def folders_are_packages(sources: Sequence[Source]) -> Iterator[Finding]:
    """A folder of a package without `__init__.py` is left out of the installation."""
    present = {source.path for source in sources}
    folders = {source.path.parent for source in sources if source.package in PACKAGES}
    for folder in sorted(folders):
        if folder / "__init__.py" not in present:
            yield Finding(str(folder), 1, "has no __init__.py")


def kernels_have_a_matrix(sources: Sequence[Source]) -> Iterator[Finding]:
    """A package with a kernel has tests that `make matrix` runs, so that no matrix is empty."""
    named = (s for s in sources if s.package in PACKAGES)
    kernels = {s.package for s in named if s.path.name.endswith("kernel.py")}
    for package in sorted(kernels):
        if not any(row.tier == MATRIX for row in table(ROOT / "tests" / package)):
            yield Finding(package, 1, f"tests/{package}/{TABLE} has no row of the matrix")
