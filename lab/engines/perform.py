"""`engines.py`: builds the environment, runs scenarios and servers, and says what was wrong."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.engines.environment import OVERRIDDEN, Environment
from lab.engines.registry import RUNS, SCENARIOS
from lab.engines.run import EngineError, reference_of
from lab.engines.scenarios import Scenario
from lab.tools.common import refuse


def perform(options: argparse.Namespace) -> int:
    """Do what a command asks for; return its exit code."""
    return ACTIONS[options.action](options, Environment())


def build(options: argparse.Namespace, environment: Environment) -> int:
    """Build the environment, and name what is not as the engines pin it."""
    environment.build()
    for pinned, instead in OVERRIDDEN.items():
        print(f"{pinned}: {instead}")
    return 0


def list_(options: argparse.Namespace, environment: Environment) -> int:
    """Print a line for each scenario."""
    for engine, scenario in everything():
        given = {**scenario.options, **({"rounds": scenario.rounds} if scenario.rounds > 1 else {})}
        print(f"{engine}/{scenario.name:14} {scenario.model:12} {', '.join(scenario.seen)}", end="")
        print(f"; {json.dumps(given)}" if given else "")
    return 0


def everything() -> list[tuple[str, Scenario]]:
    """All scenarios with their engines."""
    return [(engine, scenario) for engine, some in SCENARIOS.items() for scenario in some]


def chosen(names: Sequence[str]) -> list[tuple[str, Scenario]]:
    """The scenarios of these names.

    Raises:
        ValueError: for a name that none has.
    """
    found = []
    for name in names:
        some = [
            pair for pair in everything() if name in (pair[1].name, f"{pair[0]}/{pair[1].name}")
        ]
        if not some:
            raise ValueError(f"no run is called {name!r}; `engines.py list` names them")
        found += some
    return found or everything()


def run(options: argparse.Namespace, environment: Environment) -> int:
    """Run scenarios, a line for each; write --json after each."""
    environment.build()
    try:
        wanted = chosen(options.names)
    except ValueError as error:
        return refuse(error)
    kept, wrong = {}, []
    for engine, scenario in wanted:
        begun = time.monotonic()
        try:
            done = RUNS[engine](environment, scenario, options.fault)
        except EngineError as error:
            print(error)
            wrong.append(scenario.name)
            continue
        verdicts = done.verdicts(reference_of(environment, scenario))
        good = all(verdict.ok for verdict in verdicts) and not done.missing()
        wrong += [] if good else [scenario.name]
        print(f"{'right' if good else 'WRONG'} {engine}/{scenario.name}, ", end="")
        print(f"{time.monotonic() - begun:.0f} s, {len(done.compiled())} kernels compiled")
        lines = [*map(str, verdicts), *(f"not seen: {name}" for name in done.missing())]
        print(*(f"    {line}" for line in lines), sep="\n", flush=True)
        kept[f"{engine}/{scenario.name}"] = {
            "right": good, "verdicts": [vars(verdict) for verdict in verdicts],
            "missing": done.missing(), "compiled": done.compiled(), "rounds": done.rounds,
        }  # fmt: skip
        _write(options.json, kept)
    print(f"{len(wanted) - len(wrong)} of {len(wanted)} right", *wrong)
    return 1 if wrong else 0


def load(options: argparse.Namespace, environment: Environment) -> int:
    """Put a load on a server, and judge all of it."""
    from lab.engines.load import Report, under_load

    environment.build()
    report: Report = under_load(
        environment, options.engine, options.model, options.requests, options.at_once, options.seed
    )
    print(report)
    _write(options.json, report.facts())
    return 0 if report.ok else 1


def newest(options: argparse.Namespace, environment: Environment) -> int:
    """Say what broke in the newest versions."""
    from lab.engines.newest import compare

    try:
        broken = compare(environment, {"vllm": options.vllm, "sglang": options.sglang})
    except LookupError as error:
        return refuse(error)
    for engine, lines in broken.items():
        print(f"{engine}: {'nothing broke' if not lines else ''}")
        print(*(f"    {line}" for line in lines), sep="\n")
    _write(options.json, broken)
    return 1 if any(broken.values()) else 0


def _write(path: Path | None, what: Any) -> None:
    if path is not None:
        path.write_text(json.dumps(what, indent=1), encoding="utf-8")


ACTIONS: Mapping[str, Callable[[argparse.Namespace, Environment], int]] = {
    "build": build, "list": list_, "run": run, "load": load, "newest": newest,
}  # fmt: skip
