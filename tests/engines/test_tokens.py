"""`LLM.generate` and `Engine.generate` on our backends: models, caches, schedules, drafts, ranks;
and faults that the comparison notices.
"""

from __future__ import annotations

import pytest

from lab.engines.registry import PLANTED, RUNS, SCENARIOS


def grouped(engine: str, name: str, *more: str):
    """Parameters of a scenario, whose worker keeps the models that judge it."""
    scenario = next(found for found in SCENARIOS[engine] if found.name == name)
    group = pytest.mark.xdist_group(scenario.weights or scenario.model)
    label = "-".join((engine, *more, name))
    return pytest.param(engine, scenario, *more, marks=group, id=label)


ALL = [grouped(engine, found.name) for engine, some in SCENARIOS.items() for found in some]
FAULTS = [
    grouped(engine, name, fault)
    for engine, planted in PLANTED.items()
    for fault, name in planted.items()
]


@pytest.mark.parametrize(("engine", "scenario"), ALL)
def test_tokens(engine, scenario, environment, reference_of):
    run = RUNS[engine](environment, scenario, "")
    assert run.missing() == []
    verdicts = run.verdicts(reference_of(scenario))
    assert all(verdict.ok for verdict in verdicts), "\n".join(map(str, verdicts))


@pytest.mark.parametrize(("engine", "scenario", "fault"), FAULTS)
def test_a_planted_fault_is_noticed(engine, scenario, fault, environment, reference_of):
    run = RUNS[engine](environment, scenario, fault)
    verdicts = run.verdicts(reference_of(scenario))
    assert not all(verdict.ok for verdict in verdicts), "\n".join(map(str, verdicts))
