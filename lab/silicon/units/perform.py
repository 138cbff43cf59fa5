"""`bench.py units`: runs the benchmarks in worker processes, and writes rows and a table.

The work is a child's (`worker`). One that ends early, or says nothing for a while, is ended and
followed by another that begins behind the benchmark at which it was; that one's row says why.
"""

from __future__ import annotations

import argparse
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator

from lab.silicon.units import worker
from lab.silicon.units.benchmark import Benchmark, failed
from lab.silicon.units.benchmarks import benchmarks_of
from lab.silicon.units.flags import GROUPS
from lab.silicon.units.launches import Timed
from lab.silicon.units.ptx import ARCH_OF_CAPABILITY
from lab.tools.common import environment, read_rows, refuse, save_rows, tracked
from lab.tools.tables import show, table

SILENCE = 60.0  # seconds after which a child hangs
MOST_FAILURES = 30  # children that end early
COLUMNS = (
    ("benchmark", "{benchmark}"), ("variant", lambda row: words_of(row["variant"])),
    ("value", "{value:.2f}"), ("low", "{low:.2f}"), ("high", "{high:.2f}"),
    ("unit", lambda row: row["error"] if "error" in row else row["unit"]),
)  # fmt: skip


def words_of(variant: dict) -> str:
    """`warps 4, schedulers 1`."""
    return ", ".join(f"{name} {value}" for name, value in variant.items())


class Child:
    """A worker, whose lines are read by a thread so that silence is noticed."""

    def __init__(self, groups: list[str], first: int, repeats: int) -> None:
        command = [sys.executable, "-m", "lab.silicon.units.worker", ",".join(groups), str(first)]
        self.process = subprocess.Popen(
            [*command, str(repeats)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment(),
        )  # fmt: skip
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.said = ""
        self.readers = [threading.Thread(target=read, daemon=True)
                        for read in (self._read, self._listen)]  # fmt: skip
        for reader in self.readers:
            reader.start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.lines.put(line)
        self.lines.put(None)

    def _listen(self) -> None:
        for line in self.process.stderr or ():
            self.said = line.strip() or self.said

    def __iter__(self) -> Iterator[dict]:
        while True:
            try:
                line = self.lines.get(timeout=SILENCE)
            except queue.Empty:
                self.said = f"nothing for {SILENCE:.0f} s: it hangs"
                return
            if line is None:
                return
            yield json.loads(line)

    def end(self) -> int:
        """The exit code; a child that hangs is killed."""
        if self.process.poll() is None and self.said.endswith("hangs"):
            self.process.kill()
        code = self.process.wait()
        self.readers[1].join(timeout=5)
        return code


def rows_of(groups: list[str], repeats: int) -> Iterator[dict]:
    """First what the GPU is, {"gpu": ...}, then a row for each benchmark, in order."""
    wanted: list[Benchmark | Timed] | None = None
    place, failures = 0, 0
    while (wanted is None or place < len(wanted)) and failures < MOST_FAILURES:
        child, began = Child(groups, place, repeats), False
        for message in child:
            if "gpu" in message:
                began = True
                if wanted is None:
                    capability = message["gpu"].get("capability", "9.0")
                    wanted = wanted_of(groups, ARCH_OF_CAPABILITY[capability])
                    yield message
                continue
            place = message["index"] + 1
            _tell(place, len(wanted), message["row"])
            yield message["row"]
        code, reason = child.end(), child.said
        if not began or wanted is None:
            raise OSError(f"the worker has not started: {reason or code}")
        if code == 0:
            break
        if code != 3 and place < len(wanted):  # it broke within one, and not behind it
            yield failed(wanted[place], reason or f"exit code {code}")
            place += 1
        failures += 1


def wanted_of(groups: list[str], arch: str) -> list[Benchmark | Timed]:
    """Benchmarks for an architecture. OSError where a group that was asked for has none; of all
    groups it takes those that have some."""
    found = list(benchmarks_of(groups, arch))
    missing = [group for group in groups if all(each.group != group for each in found)]
    if missing and set(groups) != set(GROUPS):
        raise OSError(f"--groups {missing[0]}: there is nothing of it for {arch}")
    return found


def _tell(done: int, count: int, row: dict) -> None:
    """A line of progress on stderr."""
    if sys.stderr.isatty():
        print(f"\r{done}/{count} {row['group']} {row['benchmark']:<24}", end="", file=sys.stderr)
    elif done % 50 == 0 or "error" in row:
        print(f"{done}/{count} {row['benchmark']} {row.get('error', '')}", file=sys.stderr)


def show_rows(rows: list[dict]) -> None:
    """A table per group."""
    setting, *found = rows
    gpu = setting.get("device", {}).get("name", "no GPU")
    print(f"{gpu}, {setting.get('date', '')}, median of {setting.get('repeats', '?')}")
    for group in dict.fromkeys(row["group"] for row in found):
        mine = [row for row in found if row["group"] == group]
        show(*table(group, COLUMNS, mine))


def heading_of(device: dict, repeats: int) -> dict:
    """Return the heading with machine and versions from torch, if it is installed."""
    try:
        from lab.measure.timing import heading
    except ImportError:
        return {"kind": "setting", "device": device, "repeats": repeats}
    return heading(device=device, repeats=repeats)


def emulated(groups: list[str], arch: str, every: int) -> int:
    """Each kernel, in the emulator under its checker: 1 if one is not as it should be."""
    try:
        found = [each for each in wanted_of(groups, arch) if worker.can(each)][::every]
    except OSError as refused:
        return refuse(refused)
    faults = 0
    for benchmark in tracked(found, "emulating"):
        if fault := worker.wrong(benchmark, arch):
            faults += 1
            print(f"{benchmark.name} ({words_of(benchmark.variant)}): {fault}")
    print(f"{len(found)} kernels for {arch} in the emulator, {faults} not as they should be")
    return int(faults > 0)


def perform(options: argparse.Namespace) -> int:
    if options.emulate:
        return emulated(options.groups, options.emulate, options.every)
    if options.show:
        show_rows(read_rows(options.show))
        return 0
    device: dict = {}
    rows: list[dict] = []
    try:
        for message in rows_of(options.groups, options.repeat):
            if "gpu" in message:
                device = message["gpu"]
                continue
            rows.append(message)
            if options.json:  # what is known stays, whatever happens later
                save_rows(options.json, [{"kind": "setting", "device": device}, *rows])
    except OSError as error:
        return refuse(error)
    clocks = {row["variant"]["load"]: row["value"] for row in rows
              if row["benchmark"] == "clock" and "value" in row}  # fmt: skip
    rows = [{**heading_of(device, options.repeat), "ghz": clocks}, *rows]
    show_rows(rows)
    if options.json:
        save_rows(options.json, rows)
    return 0
