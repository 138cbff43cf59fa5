"""Engines by name: their scenarios, and how these are run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from lab.engines.environment import Environment
from lab.engines.run import Run, run_vllm
from lab.engines.scenarios import PLANTED as IN_VLLM
from lab.engines.scenarios import VLLM, Scenario
from lab.engines.sglang_scenarios import PLANTED as IN_SGLANG
from lab.engines.sglang_scenarios import SGLANG, run_sglang

SCENARIOS: Mapping[str, Sequence[Scenario]] = {"vllm": VLLM, "sglang": SGLANG}
# engine -> fault of `harness.observe` -> scenario that has to notice it
PLANTED: Mapping[str, Mapping[str, str]] = {"vllm": IN_VLLM, "sglang": IN_SGLANG}
# engine -> (environment, scenario, fault) -> Run
RUNS: Mapping[str, Callable[[Environment, Scenario, str], Run]] = {
    "vllm": run_vllm, "sglang": run_sglang,
}  # fmt: skip
