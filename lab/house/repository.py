"""Rules of what git keeps, and of commands."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import PurePosixPath

from lab.house.size import MARKDOWN_COLUMNS, PACKAGE_README_LINES
from lab.house.source import LINK, PACKAGES, ROOT, Finding, Source
from lab.house.tiers import MATRIX, TABLE, table
from lab.tools.command import Command
from ptxemu.host.command_line import output_file


def _flags(parser: argparse.ArgumentParser, *, what: str, picture: bool = False) -> None:
    parser.set_defaults(what=what)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="the same as JSON")
    if picture:
        parser.add_argument("--png", type=output_file, metavar="FILE", help="packages as a picture")


def _command(what: str, about: str, **options: bool) -> Command:
    return Command("lab.house.perform", partial(_flags, what=what, **options), about)


def _prose_flags(parser: argparse.ArgumentParser) -> None:
    _flags(parser, what="prose")
    parser.add_argument(
        "--in", dest="folder", default="", metavar="FOLDER", help="show these alone"
    )
    parser.add_argument("--write", action="store_true", help="keep counts that have fallen")


def _support_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--write", action="store_true", help="keep the page")


HOUSE = {
    "graph": _command(
        "graph",
        "Prints who imports whom: packages, then circles and arrows upwards.\n\n"
        "Imports inside functions count. Exit code 1 where there is a circle between files or\n"
        "folders, or an arrow that the order of packages does not allow.",
        picture=True,
    ),
    "files": _command("files", "Prints the files of the families side by side, by their duties."),
    "hops": _command(
        "hops",
        "Counts the files that a call touches between the public function and the launch.\n\n"
        "The second call of four operators, on the GPU at hand or as if there were one. Exit code\n"
        "1 where one touches more than its limit.",
    ),
    "trips": _command(
        "trips",
        "Counts the files that a checked call enters, and its moves from one to another.\n\n"
        "The second call of four operators in the emulator, its kernel compiled, nothing of an\n"
        "earlier call repeated. Exit code 1 where one is above what the design asks for.",
    ),
    "prose": Command(
        "lab.house.perform",
        _prose_flags,
        "Lists offences against the rules of language, and counts them by rule and folder.\n\n"
        "lab/house/prose.json has the counts that are older than the rules. Exit code 1 where one\n"
        "has risen.",
    ),
    "support": Command(
        "lab.support.perform",
        _support_flags,
        "Prints docs/support.md: what every function accepts, asked of its own checks.\n\n"
        "Compiles nothing, and takes a minute. Exit code 1 where the page that is kept differs.",
    ),
    "links": _command(
        "links",
        "Checks the links of the site in out/site, which `make docs` builds.\n\n"
        "Exit code 1 where a link leads nowhere, or where a page loads from another host.",
    ),
    "lines": _command(
        "lines", "Counts lines by package, and names the longest files and functions."
    ),
}


PROGRAMS = PurePosixPath("tests/ptxemu/ptx")
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:home|work|root|Users|opt|mnt)/[\w.]")


def no_machine_paths(path: PurePosixPath, text: str) -> Iterator[Finding]:
    """A path of somebody's machine means nothing on another."""
    for number, line in enumerate(text.splitlines(), start=1):
        if MACHINE_PATH.search(line):
            yield Finding(str(path), number, f"names a path of one machine: {line.strip()[:60]}")


def no_dumps(path: PurePosixPath, text: str) -> Iterator[Finding]:
    """Report files that a compiler or a run left behind; tests of ptxemu may keep PTX programs."""
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
