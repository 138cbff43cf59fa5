"""Tiers of tests, with reasons: one table per folder, `tests/<folder>/tiers.md`.

Quick tests run in `make test`, those of the matrix in `make matrix`, the sweep takes hours; real
engines run in `make engines`. Each row of a table names tests by patterns, in which `*` is anything
and a file or function stands for all that it has; `2 of 3` takes the second of every three of them,
in their order, and `first 9` so many from the beginning. `2 of 2 in the matrix` counts only those
that the rows above leave there. Of the rows that match a test the last one decides, and a test that
no row matches is an error. Positions are those of the whole package, so a run of single tests may
see other tiers; the targets of the Makefile never do that. `make tiers` prints what comes of it
(`tests.support.pairs`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[2] / "tests"
TABLE = "tiers.md"
QUICK, MATRIX, SWEEP = TIERS = ("quick", "matrix", "sweep")
ENGINES = "engines"  # no test of a kernel: `make tiers` does not count them
MARKS = {  # quick tests have none
    MATRIX: pytest.mark.matrix, SWEEP: pytest.mark.sweep, ENGINES: pytest.mark.engines,
}  # fmt: skip
DECIDED = pytest.StashKey["dict[Path, set[Row]]"]()  # what `assign` returned to this session
_ROW = re.compile(
    r"^\| (`.*?`)(?:, (\d+) of (\d+)( in the matrix)?|, first (\d+))? \| (\w+) \| (.+) \|$"
)


@dataclass(frozen=True)
class Row:
    """Tests that match one of `patterns`, of every `of` in a row the one at `turn`, of all of them
    the `first` ones."""

    patterns: tuple[str, ...]
    tier: str
    why: str
    turn: int = 1
    of: int = 1
    first: int | None = None
    in_matrix: bool = False  # only tests are counted that rows before this one leave in the matrix

    @cached_property
    def _expression(self) -> re.Pattern:
        parts = (".*".join(map(re.escape, pattern.split("*"))) for pattern in self.patterns)
        return re.compile(rf"(?:{'|'.join(parts)})(?:\[.*|::.*)?", re.DOTALL)

    def matches(self, name: str) -> bool:
        """name: test_file.py::test_function[parameters]"""
        return self._expression.fullmatch(name) is not None

    def takes(self, number: int) -> bool:
        """Number among the tests that match, counted from 1."""
        return (number - self.turn) % self.of == 0 and number <= (self.first or number)


def parse(text: str) -> tuple[Row, ...]:
    """Rows of a table in Markdown, which is all of the text that begins with a pattern."""
    rows = []
    for line in text.splitlines():
        if not line.startswith("| `"):
            continue
        match = _ROW.match(line)
        if match is None or match[6] not in (*TIERS, ENGINES):
            raise ValueError(f"not | `tests` | {' or '.join(TIERS)} | why |: {line}")
        patterns = tuple(re.findall(r"`([^`]+)`", match[1]))
        turn, of, first = (int(count) if count else None for count in match.group(2, 3, 5))
        rows.append(Row(patterns, match[6], match[7], turn or 1, of or 1, first, bool(match[4])))
    return tuple(rows)


@cache
def table(folder: Path) -> tuple[Row, ...]:
    """The rows of a folder; none where it has no table, and its tests bear marks of their own."""
    path = folder / TABLE
    return parse(path.read_text(encoding="utf-8")) if path.exists() else ()


def deciding(rows: Sequence[Row], names: Iterable[str]) -> list[Row | None]:
    """Return for each test of a folder, in order, the row that decides its tier."""
    seen: Counter = Counter()
    found = []
    for name in names:
        chosen = None
        for number, row in enumerate(rows):
            if row.in_matrix and (chosen is None or chosen.tier != MATRIX):
                continue
            if row.matches(name):
                seen[number] += 1
                if row.takes(seen[number]):
                    chosen = row
        found.append(chosen)
    return found


def package_of(item: pytest.Item) -> str:
    """The folder of tests/ in which it is, '' directly there."""
    first, *rest = item.path.relative_to(TESTS).parts
    return first if rest else ""


def folder_of(path: Path) -> Path:
    """The nearest folder around a test file that has a table."""
    return next(folder for folder in path.parents if folder == TESTS or (folder / TABLE).exists())


def tier_of(item: pytest.Item) -> str:
    """Return the tier that a test's marks give."""
    return next((tier for tier in MARKS if item.get_closest_marker(tier)), QUICK)


def assign(items: Sequence[pytest.Item]) -> dict[Path, set[Row]]:
    """Mark each test as its table says. Returns which rows decided, of each folder all of whose
    files are there."""
    by_folder: dict[Path, list[pytest.Item]] = {}
    for item in items:
        by_folder.setdefault(folder_of(item.path), []).append(item)
    decided, nowhere = {}, []
    for folder, group in by_folder.items():
        rows = table(folder)
        if not rows:
            continue
        names = [f"{item.path.relative_to(folder).as_posix()}::{item.name}" for item in group]
        chosen = deciding(rows, names)
        for item, row in zip(group, chosen, strict=True):
            if row is None:
                nowhere.append(item.nodeid)
            elif row.tier in MARKS:
                item.add_marker(MARKS[row.tier])
        if {item.path for item in group} >= files_of(folder):
            decided[folder] = {row for row in chosen if row}
    if nowhere:
        raise pytest.UsageError(f"no row of {TABLE} says when to run: " + ", ".join(nowhere[:5]))
    return decided


def files_of(folder: Path) -> set[Path]:
    """Return the test files that this folder's table is about."""
    return {path for path in folder.rglob("test_*.py") if folder_of(path) == folder}
