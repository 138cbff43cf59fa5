"""What the tables of tiers come to: `make tiers`, which is `python -m tests.tier_report`.

Tests of each package and tier, the kernels that they would compile (--kernels; that takes minutes),
and the pairs of values of factors that each family's tests have in a tier and those before it.
--save keeps all of it as one part, `before` or `after`, of results/test_coverage.json.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lab.house.tiers import TESTS, TIERS, package_of, tier_of
from tests import coverage

ROOT = TESTS.parent
SAVED = ROOT / "results" / "test_coverage.json"
HOUSE = "house"  # tests of no package
COMPILING = (
    "fmha",
    "gqa_lowlatency",
    "kernelkit",
    "kvcache",
    "mla",
    "moe",
    "q8_0",
)  # what has kernels


class Collected:
    """Tests that need no GPU: (folder/file::function, tier, parameters)."""

    def __init__(self) -> None:
        self.tests: list[tuple[str, str, dict[str, Any]]] = []
        self.counts: dict[str, Counter] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            if item.get_closest_marker("hw"):
                continue
            file = item.path.relative_to(TESTS).as_posix()
            parameters = item.callspec.params if hasattr(item, "callspec") else {}
            self.tests.append((f"{file}::{item.originalname}", tier_of(item), parameters))
            self.counts.setdefault(package_of(item) or HOUSE, Counter())[tier_of(item)] += 1


def collect() -> Collected:
    """All tests there are; pytest says nothing unless it fails."""
    found, said = Collected(), io.StringIO()
    with contextlib.redirect_stdout(said):
        code = pytest.main(["--collect-only", "-q", str(TESTS)], plugins=[found])
    if code:
        sys.exit(said.getvalue()[-3000:])
    return found


def kernels(jobs: int) -> dict[str, dict[str, int]]:
    """package -> tier -> distinct kernels; tests that fail are no news."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernels.json")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.kernels"]
        command += ["--kernels-json", str(file), "-m", "not hw"]
        command += [str(TESTS / package) for package in COMPILING]
        command += ["-n", str(jobs), "--dist", "loadgroup", "--tb=no"]
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
        return json.loads(file.read_text(encoding="utf-8"))


def report(counts: dict[str, Counter], pairs: dict, compiled: dict) -> dict[str, Any]:
    """As results/test_coverage.json has it."""
    packages = {}
    for package, tiers in sorted(counts.items()):
        packages[package] = {}
        for tier in TIERS:
            of_tier = {"tests": tiers[tier]}
            if compiled:
                of_tier["kernels"] = compiled.get(package, {}).get(tier, 0)
            packages[package][tier] = of_tier
    return {"packages": packages, "pairs": pairs}


def lines(found: dict[str, Any]) -> list[str]:
    """Two tables in Markdown."""
    shown = ["| package | " + " | ".join(TIERS) + " |", "|---" * (len(TIERS) + 1) + "|"]
    for package, tiers in found["packages"].items():
        cells = [
            f"{cell['tests']}" + f" ({cell.get('kernels', 0)} kernels)" * ("kernels" in cell)
            for cell in tiers.values()
        ]
        shown.append(f"| {package} | " + " | ".join(cells) + " |")
    shown += ["", "| pairs of values | valid | quick | and matrix | and sweep |", "|---" * 5 + "|"]
    for family, sums in found["pairs"].items():
        shares = (f"{sums[tier]} ({sums[tier] / sums['valid']:.1%})" for tier in TIERS)
        shown.append(f"| {family} | {sums['valid']} | " + " | ".join(shares) + " |")
    return shown


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kernels", action="store_true", help="count kernels, too")
    parser.add_argument("--jobs", type=int, default=2, help="workers that count kernels")
    parser.add_argument("--save", choices=("before", "after"), help="keep it under results/")
    options = parser.parse_args(argv)
    found = collect()
    compiled = kernels(options.jobs) if options.kernels else {}
    result = report(found.counts, coverage.table(found.tests), compiled)
    print("\n".join(lines(result)))
    if options.save:
        parts = json.loads(SAVED.read_text(encoding="utf-8")) if SAVED.exists() else {}
        parts[options.save] = result
        SAVED.write_text(json.dumps(parts, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
