"""`run`: a scenario in the environment of the engines, as a process; what it said and did."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lab.engines.environment import Environment
from lab.engines.harness.observe import FAULT, FOLDER, read
from lab.engines.judge import Reference, Verdict
from lab.engines.scenarios import SEEN, Scenario
from lab.house.source import ROOT

LLM = {  # of vLLM, in every run
    "attention_backend": "BLACKWELL_KERNELS", "skip_tokenizer_init": True, "enforce_eager": True,
    "dtype": "bfloat16", "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": 8 << 20, "block_size": 16, "enable_prefix_caching": True,
    "disable_log_stats": False, "compilation_config": {"custom_ops": ["none"]},
}  # fmt: skip
LIMIT = 600  # seconds of a run


class EngineError(RuntimeError):
    """An engine's process that failed; the message has the end of its log."""


@dataclass(frozen=True)
class Run:
    """What a scenario brought.

    rounds: answers to each prompt, as the worker writes them
    metrics: of the engine, by name
    calls: lines of `harness.observe`
    """

    scenario: Scenario
    rounds: Sequence[Sequence[dict[str, Any]]]
    metrics: Mapping[str, float]
    calls: Sequence[Mapping[str, Any]]

    def missing(self) -> list[str]:
        """Names of what should have been seen or counted, and was not."""
        attended = [call for call in self.calls if call["what"] == "attend"]
        unseen = [name for name in self.scenario.seen if not any(map(SEEN[name], attended))]
        return unseen + [name for name in self.scenario.counted if not self.metrics.get(name)]

    def compiled(self) -> list[str]:
        """Kernels that were compiled in this run."""
        return [call["kernel"] for call in self.calls if call["what"] == "compile"]

    def verdicts(self, reference: Reference) -> list[Verdict]:
        """Judge the answers to each prompt in all rounds, by one scale of rounding: short prompts
        have too few places to show it."""
        found = [
            reference.judge(prompt, answers)
            for prompt, answers in zip(
                self.scenario.prompts(), zip(*self.rounds, strict=True), strict=True
            )
        ]
        own = max(verdict.own for verdict in found)
        return [replace(verdict, own=own) for verdict in found]


def reference_of(environment: Environment, scenario: Scenario) -> Reference:
    """The judge of a scenario's tokens; its models stay in memory."""
    name = scenario.weights or scenario.model
    key = environment.models / name, str(scenario.scales)
    if key not in _references:
        _references[key] = Reference(key[0], scenario.scales)
    return _references[key]


_references: dict[tuple[Path, str], Reference] = {}


def end(process: subprocess.Popen) -> None:
    """Kill what is left of a process and of those that it started; it leads a session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_vllm(environment: Environment, scenario: Scenario, fault: str = "") -> Run:
    """Run a scenario of vLLM. fault: of `harness.observe.FAULTS`, planted into the adapter.

    Raises:
        EngineError: if the process fails or takes more than LIMIT seconds.
    """
    job = {
        "llm": {**LLM, "model": str(environment.models / scenario.model), **scenario.options},
        "rounds": [{"prompts": scenario.prompts(), "tokens": scenario.tokens}] * scenario.rounds,
    }
    return run(environment, scenario, "lab.engines.vllm_worker", job, fault)


def run(
    environment: Environment, scenario: Scenario, worker: str, job: Mapping[str, Any],
    fault: str = "",
) -> Run:  # fmt: skip
    """Run a worker with a job; its log stays in the environment's folder.

    Raises:
        EngineError: as `run_vllm`.
    """
    name = f"{worker.rpartition('.')[2].partition('_')[0]}-{scenario.name}{fault and '-' + fault}"
    place = environment.folder / "runs" / name
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    files = place / "job.json", place / "result.json"
    files[0].write_text(json.dumps(job), encoding="utf-8")
    variables = environment.variables() | dict(scenario.variables) | {FOLDER: str(place / "calls")}
    if fault:
        variables[FAULT] = fault
    with (place / "log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [environment.python, "-m", worker, *files], stdout=log, stderr=subprocess.STDOUT,
            env=variables, cwd=ROOT, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            code = f"no result within {LIMIT} s"
        finally:
            end(process)
    if code:
        tail = (place / "log").read_text(encoding="utf-8", errors="replace")[-3000:]
        raise EngineError(f"{name} ended with {code}; the end of {place / 'log'}:\n{tail}")
    result = json.loads(files[1].read_text(encoding="utf-8"))
    return Run(scenario, result["rounds"], result["metrics"], read(place / "calls"))
