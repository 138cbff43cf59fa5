"""Coverage of the tests: `make tiers`, which is `python -m tests.support.pairs`.

Prints the number of tests of each package and tier, and for each family of kernels the pairs of
values of two factors that its tests cover in a tier and earlier ones. A family with a space
(`tests.support.pairwise.Space`) counts its valid pairs, and the tests whose case is a row of the
space. Other families have lists of cases written by hand: there a factor is a parameter of a test
or a field of its case, including `test`, and a pair is valid if any tier has it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from lab.house.source import ROOT
from lab.house.tiers import TESTS, TIERS, package_of, tier_of
from tests.fmha import space as fmha
from tests.gqa_lowlatency import space as gqa
from tests.moe import grouped_space as moe
from tests.moe import mixed_space as mixed
from tests.support.pairwise import Space

SAVED = ROOT / "results" / "test_coverage.json"
HOUSE = "house"  # tests of no package

Row = Mapping[str, Any]
SEEDS = ("seed", "name")  # fields that are no factors


@dataclass(frozen=True)
class Family:
    """A family of kernels.

    tests: prefixes of names, folder/file or folder/file::function.
    rows: rows for a test's name and parameters, none if they are no case of the family.
    """

    name: str
    tests: tuple[str, ...]
    rows: Callable[[str, Row], Sequence[Row]]
    space: Space | None = None


def of_space(name: str, package: str, module: Any) -> Family:
    """A family with the cases of `module`, which has a space and a function from rows to cases, or
    one from cases to their rows."""
    known = {module.case_of(row): [row] for row in getattr(module, "ROWS", ())}
    rows_of = getattr(module, "rows_of", lambda case: known.get(case, []))

    def rows(_: str, parameters: Row) -> Sequence[Row]:
        cases = (value for value in parameters.values() if isinstance(value, module.Case))
        return [row for case in cases for row in rows_of(case)]

    return Family(name, (f"{package}/",), rows, module.SPACE)


def by_hand(name: str, *tests: str) -> Family:
    """A family of any tests with parameters."""

    def rows(test: str, parameters: Row) -> Sequence[Row]:
        values = {"test": test.rpartition("::")[2]}
        for key, value in parameters.items():
            fields = vars(value) if dataclasses.is_dataclass(value) else {key: value}
            values |= {key: repr(field) for key, field in fields.items() if key not in SEEDS}
        return [values] if parameters else []

    return Family(name, tests, rows)


FAMILIES = (
    of_space("fmha", "fmha", fmha),
    of_space("grouped GEMM", "moe", moe),
    of_space("grouped GEMM of Hopper", "moe", mixed),
    of_space("gqa_lowlatency", "gqa_lowlatency", gqa),
    by_hand("router and permutation", "moe/test_routing.py::test_route",
            "moe/test_routing.py::test_permutation"),
    by_hand("quantiser", "moe/test_quantise.py::test_bits", "moe/test_quantise.py::test_matrix",
            "moe/test_quantise.py::test_every_token"),
    by_hand("combination", "moe/test_routing.py::test_combine"),
    by_hand("attention over a cache", "mla/test_cached.py",
            "kvcache/test_attention.py"),
    by_hand("append, gather, copy", "kvcache/movement/test_kernels.py"),
    by_hand("compressor", "mla/test_compressor.py"),
    by_hand("indexer", "mla/test_index_query.py::test_queries",
            "mla/test_index_query.py::test_more", "mla/test_scores.py",
            "mla/test_select.py::test_select", "mla/test_select.py::test_every"),
)  # fmt: skip


def pairs(row: Row) -> set[tuple]:
    """Pairs of two of its factors with their values."""
    return set(map(frozenset, itertools.combinations(row.items(), 2)))


def table(tests: Iterable[tuple[str, str, Row]]) -> dict[str, dict[str, int]]:
    """Return family -> valid pairs, and pairs covered by a tier together with earlier ones. tests:
    (folder/file::function, tier, parameters)."""
    tests = list(tests)
    found = {}
    for family in FAMILIES:
        seen: dict[str, set] = {tier: set() for tier in TIERS}
        for name, tier, parameters in tests:
            if name.startswith(family.tests):
                seen[tier].update(*map(pairs, family.rows(name, parameters)))
        possible = family.space.pairs() if family.space else set().union(*seen.values())
        valid = set(map(frozenset, possible))
        so_far, sums = set(), {"valid": len(valid)}
        for tier in TIERS:
            so_far |= seen[tier] & valid
            sums[tier] = len(so_far)
        found[family.name] = sums
    return found


class Collected:
    """Tests that need no GPU: (folder/file::function, tier, parameters), and their numbers."""

    def __init__(self) -> None:
        self.tests: list[tuple[str, str, Row]] = []
        self.counts: dict[str, Counter[str]] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            if item.get_closest_marker("hw"):
                continue
            file = item.path.relative_to(TESTS).as_posix()
            parameters = item.callspec.params if hasattr(item, "callspec") else {}
            self.tests.append((f"{file}::{item.originalname}", tier_of(item), parameters))
            self.counts.setdefault(package_of(item) or HOUSE, Counter())[tier_of(item)] += 1


def collect() -> Collected:
    """Collect all tests; if that fails, exit with pytest's output."""
    found, printed = Collected(), io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = pytest.main(["--collect-only", "-q", str(TESTS)], plugins=[found])
    if code:
        sys.exit(printed.getvalue()[-3000:])
    return found


def lines(counts: Mapping[str, Counter[str]], covered: dict[str, dict[str, int]]) -> list[str]:
    """Two tables in Markdown."""
    shown = ["| tests | " + " | ".join(TIERS) + " |", "|---" * (len(TIERS) + 1) + "|"]
    for package, tiers in sorted(counts.items()):
        shown.append(f"| {package} | " + " | ".join(str(tiers[tier]) for tier in TIERS) + " |")
    shown += ["", "| pairs of values | valid | quick | and matrix | and sweep |", "|---" * 5 + "|"]
    for family, sums in covered.items():
        shares = (f"{sums[tier]} ({sums[tier] / sums['valid']:.1%})" for tier in TIERS)
        shown.append(f"| {family} | {sums['valid']} | " + " | ".join(shares) + " |")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--save", action="store_true", help=f"keep it as {SAVED.name}, too")
    save = parser.parse_args().save
    found = collect()
    covered = table(found.tests)
    print("\n".join(lines(found.counts, covered)))
    if save:
        tests = {package: dict(tiers) for package, tiers in sorted(found.counts.items())}
        text = json.dumps({"tests": tests, "pairs": covered}, indent=1)
        SAVED.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
