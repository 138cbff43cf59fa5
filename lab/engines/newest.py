"""`compare`: the newest vLLM and SGLang of the index, and what of them breaks our plugins."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping

from lab.engines.environment import VERSIONS, Environment
from lab.engines.interfaces import NAMES
from lab.engines.registry import RUNS, SCENARIOS
from lab.engines.run import EngineError, reference_of
from lab.house.source import ROOT


def newest_of(environment: Environment, name: str) -> str:
    """Return the newest version that the index has.

    Raises:
        LookupError: if pip names none.
    """
    command = [environment.python, "-m", "pip", "index", "versions", name]
    said = subprocess.run(command, capture_output=True, text=True)
    found = re.match(rf"{re.escape(name)} \((\S+)\)", said.stdout)
    if not found:
        raise LookupError(f"the index names no version of {name}: {said.stderr.strip()[-500:]}")
    return found[1]


def signatures(environment: Environment, engine: str) -> dict[str, str | None]:
    """Return the signature of each name that our plugin for an engine uses."""
    command = [environment.python, "-m", "lab.engines.interfaces", engine]
    said = subprocess.run(
        command, capture_output=True, text=True, env=environment.variables(), cwd=ROOT
    )
    if said.returncode:
        return dict.fromkeys(NAMES[engine])
    return json.loads(said.stdout.splitlines()[-1])


def changes(before: Mapping[str, str | None], after: Mapping[str, str | None]) -> list[str]:
    """Name what is gone, and whose signature is another one."""
    lines = []
    for name, signature in before.items():
        if after[name] is None and signature is not None:
            lines.append(f"{name} is gone")
        elif after[name] != signature:
            lines.append(f"{name} was {signature}, is {after[name]}")
    return lines


def compare(environment: Environment, named: Mapping[str, str | None]) -> dict[str, list[str]]:
    """Install the newest versions beside the pinned ones; say by engine what broke.

    named: versions to install in place of the newest, by engine

    Raises:
        LookupError: as `newest_of`.
    """
    environment.build()
    versions = {name: named[name] or newest_of(environment, name) for name in VERSIONS}
    if versions == environment.versions:
        print(f"the index has nothing newer than {versions}")
        return {name: [] for name in versions}
    other = Environment(environment.folder / "newest", versions)
    other.build()
    broken = {}
    for engine in versions:
        if versions[engine] == environment.versions[engine]:
            continue
        lines = changes(signatures(environment, engine), signatures(other, engine))
        broken[f"{engine} {versions[engine]}"] = lines + _first_run(other, engine)
    return broken


def _first_run(environment: Environment, engine: str) -> list[str]:
    """Say what is wrong with the first scenario of an engine."""
    scenario = SCENARIOS[engine][0]
    try:
        run = RUNS[engine](environment, scenario, "")
    except EngineError as error:
        lines = [line for line in str(error).splitlines() if "Error" in line]
        return [f"{scenario.name}: {(lines or [str(error)])[-1].strip()}"]
    reference = reference_of(environment, scenario)
    wrong = [str(verdict) for verdict in run.verdicts(reference) if not verdict.ok]
    return [f"{scenario.name}: {line}" for line in [*run.missing(), *wrong]]
