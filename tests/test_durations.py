"""Seconds by package and tier: what a report carries, and the sums that are written."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from tests.durations import HOUSE, START_UP, Durations, cpu_seconds


@pytest.fixture
def finished(monkeypatch):
    """A session in the process that gets all reports."""
    config = SimpleNamespace(getoption=lambda name, default: 2)
    return SimpleNamespace(config=config)


def reported(durations: Durations, item: pytest.Item, when: str) -> SimpleNamespace:
    """A report, as pytest makes it with this plugin around."""
    steps = durations.pytest_runtest_makereport(item)
    next(steps)
    with pytest.raises(StopIteration) as end:
        steps.send(SimpleNamespace(when=when))
    return end.value.value


def test_a_report_says_what_it_cost(request):
    durations = Durations(None)
    durations.pytest_collection_finish()
    before = cpu_seconds()
    while cpu_seconds() - before < 0.05:
        pass
    (mine, start_up), (other,) = (
        reported(durations, request.node, when).costs for when in ("setup", "call")
    )
    assert mine[:2] == other[:2] == (HOUSE, "quick")
    assert start_up[0] == START_UP
    assert mine[2] >= 0.05 > other[2] >= 0
    assert mine[3] >= mine[2] / 2
    assert start_up[2] >= before - 0.05, "all that came before the first test"


def test_costs_are_summed_over_workers(tmp_path, finished):
    file = tmp_path / "out" / "durations.json"
    durations = Durations(str(file))
    for when in ("setup", "call", "teardown"):
        for package, seconds in (("fmha", 2.0), ("moe", 1.0)):
            costs = [(package, "quick", seconds, seconds / 2)]
            costs += [(START_UP, "", 9.0, 9.0)] * (when == "setup")
            durations.pytest_runtest_logreport(SimpleNamespace(when=when, costs=costs))
    durations.pytest_sessionfinish(finished)
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["workers"] == 2
    assert found["sums"] == [
        {"package": START_UP, "tier": "", "tests": 0, "cpu_s": 18.0, "wall_s": 18.0},
        {"package": "fmha", "tier": "quick", "tests": 1, "cpu_s": 6.0, "wall_s": 3.0},
        {"package": "moe", "tier": "quick", "tests": 1, "cpu_s": 3.0, "wall_s": 1.5},
    ]


def test_a_worker_writes_nothing(tmp_path, finished):
    finished.config.workerinput = {}
    durations = Durations(str(tmp_path / "durations.json"))
    durations.pytest_sessionfinish(finished)
    assert not list(tmp_path.iterdir())
