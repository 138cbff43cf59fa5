"""Seconds of each package and tier, summed over all workers: `--durations-json FILE`.

CPU is that of the worker and of the processes which it has waited for, because the wall clock of a
shared machine says little. What a worker does before its first test, imports and collection, counts
as `start-up`, and what it does between two tests counts for the second one.
"""

from __future__ import annotations

import json
import resource
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lab.house.tiers import package_of, tier_of

START_UP = "start-up"
HOUSE = "house"  # tests of no package
DIGITS = 1


def cpu_seconds() -> float:
    """Of this process since it began, and of children that are over."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


class Durations:
    """Every report says what it cost; the process that gets all reports writes the sums."""

    def __init__(self, file: str | None) -> None:
        self.file = file
        self.wall = self.began = time.perf_counter()
        self.cpu = 0.0
        self.start_up: tuple[float, float] | None = None
        self.sums: dict[tuple[str, str], Counter] = {}

    def _since(self) -> tuple[float, float]:
        """(CPU, wall) seconds since this was asked before."""
        before = self.cpu, self.wall
        self.cpu, self.wall = cpu_seconds(), time.perf_counter()
        return self.cpu - before[0], self.wall - before[1]

    def pytest_collection_finish(self) -> None:
        self.start_up = self._since()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Any:
        report = yield
        # Attributes of a report travel from a worker to who collects them.
        report.costs = [(package_of(item) or HOUSE, tier_of(item), *self._since())]
        if self.start_up:
            report.costs.append((START_UP, "", *self.start_up))
            self.start_up = None
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for package, tier, cpu, wall in report.costs:
            counted = self.sums.setdefault((package, tier), Counter())
            counted.update(cpu_s=cpu, wall_s=wall)
        package, tier, *_ = report.costs[0]
        self.sums[package, tier]["tests"] += report.when == "call"

    def table(self) -> list[dict[str, Any]]:
        """Rows of package and tier, those that took most at first."""
        order = sorted(self.sums.items(), key=lambda item: -item[1]["cpu_s"])
        return [
            {"package": package, "tier": tier, "tests": sums["tests"]}
            | {name: round(sums[name], DIGITS) for name in ("cpu_s", "wall_s")}
            for (package, tier), sums in order
        ]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.file is None or hasattr(session.config, "workerinput"):
            return
        found = {
            "session_wall_s": round(time.perf_counter() - self.began, DIGITS),
            "workers": session.config.getoption("numprocesses", default=None) or 1,
            "sums": self.table(),
        }
        path = Path(self.file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
