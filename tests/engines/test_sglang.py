"""SGLang's `Engine` on our backend: models, pools, schedules, drafts; faults that it notices."""

from __future__ import annotations

import pytest

from lab.engines.scenarios import Scenario
from lab.engines.sglang_scenarios import PLANTED, SGLANG, run_sglang

BY_NAME = {scenario.name: scenario for scenario in SGLANG}


def grouped(scenario: Scenario):
    """A parameter whose worker keeps the models that judge it."""
    group = pytest.mark.xdist_group(scenario.weights or scenario.model)
    return pytest.param(scenario, marks=group, id=scenario.name)


@pytest.mark.parametrize("scenario", [*map(grouped, SGLANG)])
def test_tokens(scenario, environment, reference_of):
    run = run_sglang(environment, scenario)
    assert run.missing() == []
    verdicts = run.verdicts(reference_of(scenario))
    assert all(verdict.ok for verdict in verdicts), "\n".join(map(str, verdicts))


@pytest.mark.parametrize(("fault", "name"), PLANTED.items())
def test_a_planted_fault_is_noticed(fault, name, environment, reference_of):
    run = run_sglang(environment, BY_NAME[name], fault)
    verdicts = run.verdicts(reference_of(BY_NAME[name]))
    assert not all(verdict.ok for verdict in verdicts), "\n".join(map(str, verdicts))
