"""What `bench.py first-call` does: a process for each call, the cache in a folder of its own."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from kernelkit import aot, store
from workbench.common import write_json
from workbench.flags.bench import OPERATORS
from workbench.timing import setting

NATIVE_ON_HOPPER = ("decode", "merge", "append")
ROOT = Path(__file__).resolve().parents[3]
STATES = ("compiled", "from the cache", "ahead of time")


def perform(options: argparse.Namespace) -> int:
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    names = options.operators or _possible(device)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            rows += rows_of(name, device, options.repeat, Path(folder, name))
    table = Table("operator", "kernels", "ms", "ours, ms", "graph, ms", "DSL imported")
    for row in rows:
        figures = (f"{1e3 * row[key]:.0f}" for key in ("seconds", "ours", "graph"))
        table.add_row(row["operator"], row["state"], *figures, "yes" if row["dsl"] else "no")
    Console().print(table)
    if options.json:
        write_json(options.json, {"setting": setting(), "device": device, "rows": rows})
    return 0


def _possible(device: str) -> tuple[str, ...]:
    """On Hopper not all families are native."""
    native = device == "cuda" and torch.cuda.get_device_capability()[0] == 9
    return NATIVE_ON_HOPPER if native else OPERATORS


def rows_of(name: str, device: str, repeat: int, folder: Path) -> list[dict]:
    """Cold once, then from the cache and ahead of time, of which the quickest counts."""
    record, made = folder / "run.jsonl", folder / "kernels"
    folder.mkdir(parents=True)
    cache = {store.VARIABLE: str(folder / "cache")}
    cold = call(name, device, cache | {aot.RECORD_VARIABLE: str(record)})
    warm = [call(name, device, cache) for _ in range(repeat)]
    command = [sys.executable, "-m", "kernelkit", "aot", "--for", str(record), "--out", str(made)]
    subprocess.run(command, env=_environment(cache), check=True, capture_output=True)
    ahead = {store.VARIABLE: "off", aot.VARIABLE: str(made), "WITHOUT_DSL": "1"}
    found = [[cold], warm, [call(name, device, ahead) for _ in range(repeat)]]
    return [
        {"operator": name, "state": state, **min(several, key=lambda row: row["seconds"])}
        for state, several in zip(STATES, found, strict=True)
    ]


def call(name: str, device: str, variables: dict[str, str]) -> dict:
    """What a process says of the first call of an operator."""
    command = [sys.executable, "-m", "workbench.bench.one_first_call", name, device]
    done = subprocess.run(command, env=_environment(variables), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _environment(variables: dict[str, str]) -> dict[str, str]:
    given = {name: v for name, v in os.environ.items() if not name.startswith("BLACKWELL_KERNELS")}
    here = str(ROOT), str(ROOT / "scripts")
    path = os.pathsep.join(filter(None, (*here, os.environ.get("PYTHONPATH"))))
    return given | {"PYTHONPATH": path} | variables
