"""`bench.py first-call`: runs each call in a new process, with a separate cache folder."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from kernelkit.compile import aot, store
from lab.flags.bench import OPERATORS
from lab.measure.timing import setting
from lab.tools.common import environment, write_json
from lab.tools.tables import show, table

NATIVE_ON_HOPPER = ("decode", "merge", "append")
COLUMNS = (
    ("operator", "{operator}"), ("kernels", "{state}"), ("whole", "{seconds:.3f}"),
    ("ours", "{ours:.3f}"), ("graph", "{graph:.3f}"), ("DSL imported", "{dsl}"),
)  # fmt: skip
STATES = ("compiled", "from the cache", "ahead of time")


def perform(options: argparse.Namespace) -> int:
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_hopper = device == "cuda" and torch.cuda.get_device_capability()[0] == 9
    names = options.operators or (NATIVE_ON_HOPPER if on_hopper else OPERATORS)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            rows += rows_of(name, device, options.repeat, Path(folder, name))
    show(*table("seconds", COLUMNS, rows))
    if options.json:
        write_json(options.json, {"setting": setting(), "device": device, "rows": rows})
    return 0


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
    """Return the report of a new process about the first call of an operator."""
    command = [sys.executable, "-m", "lab.bench.one_first_call", name, device]
    done = subprocess.run(command, env=_environment(variables), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _environment(variables: dict[str, str]) -> dict[str, str]:
    given = environment().items()
    return {name: v for name, v in given if not name.startswith("BLACKWELL_KERNELS")} | variables
