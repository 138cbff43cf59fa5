"""vLLM's `LLM.generate` on our backend: models, caches, schedules; and faults that it notices."""

from __future__ import annotations

import pytest

from lab.engines.run import run_vllm
from lab.engines.scenarios import PLANTED, VLLM, Scenario

BY_NAME = {scenario.name: scenario for scenario in VLLM}


def grouped(scenario: Scenario):
    """A parameter whose worker keeps the models that judge it."""
    group = pytest.mark.xdist_group(scenario.weights or scenario.model)
    return pytest.param(scenario, marks=group, id=scenario.name)


@pytest.mark.parametrize("scenario", [*map(grouped, VLLM)])
def test_tokens(scenario, environment, reference_of):
    run = run_vllm(environment, scenario)
    assert run.missing() == []
    verdicts = run.verdicts(reference_of(scenario))
    assert all(verdict.ok for verdict in verdicts), "\n".join(map(str, verdicts))


@pytest.mark.parametrize(("fault", "name"), PLANTED.items())
def test_a_planted_fault_is_noticed(fault, name, environment, reference_of):
    run = run_vllm(environment, BY_NAME[name], fault)
    verdicts = run.verdicts(reference_of(BY_NAME[name]))
    assert not all(verdict.ok for verdict in verdicts), "\n".join(map(str, verdicts))
