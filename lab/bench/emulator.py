"""What `bench.py emulator` does: how fast ptxemu executes kernels, and on what it spends the time.

Only launches are timed, from the arguments of a compiled kernel to its report, and the clock is the
CPU time of the process, beside the wall's: the former stays what it is on a busy machine.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path

from kernelkit.call.launch import emulation
from lab.bench.emulator_problems import PROBLEMS, Launches, Problem, launches_of
from lab.bench.emulator_shares import PARTS, sampled
from lab.measure.timing import heading
from lab.tools.common import read_rows, refuse, save_rows
from lab.tools.tables import Row, markdown, show, table
from ptxemu.options import Options

SAMPLED_SECONDS = 1.0  # of CPU time, at least, that the shares are taken from
HEADS = ("arith-\nmetic %", "memory\n%", "MMA\n%", "sched-\nuling %", "checker\n%", "host\n%")


def _percent(part: str, row: Row) -> str:
    return f"{100 * row['shares'][part]:.0f}"


COLUMNS = (
    ("kernel", "{kernel}"), ("problem", "{problem}"), ("", "{mode}"),
    ("warp-instr.", "{instructions:,}"), ("CPU\nms", "{cpu_ms:.1f}"),
    ("wall\nms", "{wall_ms:.1f}"), ("M/s", lambda row: f"{row['per_second'] / 1e6:.2f}"),
    *((head, partial(_percent, part)) for head, part in zip(HEADS, PARTS, strict=True)),
)  # fmt: skip


def run(launches: Launches, options: Options) -> int:
    """All of them once; returns their warp-instructions."""
    with emulation(options) as active:
        for launch in launches:
            launch()
    return sum(report.warp_instructions for report in active.reports)


def measure(call: Callable[[], int], repeat: int) -> dict[str, object]:
    """The quickest of so many calls behind one that warms up, and the shares of further calls."""
    instructions, taken = call(), []
    for _ in range(repeat):
        wall, cpu = time.perf_counter(), _cpu_seconds()
        call()
        taken.append((_cpu_seconds() - cpu, time.perf_counter() - wall))
    cpu, wall = (min(times) for times in zip(*taken, strict=True))
    return {
        "instructions": instructions,
        "cpu_ms": cpu * 1e3,
        "wall_ms": wall * 1e3,
        "per_second": instructions / cpu,
        "shares": sampled(call, SAMPLED_SECONDS),
    }


def _cpu_seconds() -> float:
    """Of this process, and of those of its children that have ended."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def rows_of(problems: dict[str, Problem], asked: Options, repeat: int) -> list[dict]:
    """Two for each kernel: plain, and under the checker."""
    rows = []
    for kernel, problem in problems.items():
        launches = launches_of(problem)
        for mode, check in (("plain", False), ("checked", True)):
            found = measure(partial(run, launches, replace(asked, check=check)), repeat)
            rows.append({"kind": "emulator", "kernel": kernel, "problem": problem.name,
                         "mode": mode, **found})  # fmt: skip
    return rows


def asked_of(options: argparse.Namespace) -> Options:
    """What launches are asked for; ValueError for processes where ptxemu has none."""
    asked = Options(policy=options.policy, seed=options.seed, limit=None)
    if hasattr(asked, "processes"):
        return replace(asked, processes=options.processes)
    if options.processes > 1:
        raise ValueError(f"--processes {options.processes}: this ptxemu has one")
    return asked


def setting_of(options: argparse.Namespace) -> dict:
    """The machine, how busy it is, and whether blocks are compiled."""
    try:
        native = os.environ.get("PTXEMU_NATIVE") != "0" and metadata.version("llvmlite")
    except metadata.PackageNotFoundError:
        native = False
    found = {"processor": processor(), "cores": os.cpu_count(), "llvmlite": native or "not used"}
    found["load"] = [round(x, 2) for x in os.getloadavg()]
    return heading(**found, repeat=options.repeat, processes=options.processes)


def processor() -> str:
    """Its name, as Linux knows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def show_rows(rows: list[dict], *, as_markdown: bool = False) -> None:
    setting, *found = rows
    title, heads, cells = table("", COLUMNS, found)
    if as_markdown:
        print(markdown([head.replace("-\n", "").replace("\n", " ") for head in heads], cells))
        return
    print(f"{setting['processor']}, {setting['cores']} cores, Python "
          f"{setting['versions']['python']}, llvmlite {setting['llvmlite']}, {setting['date']}; "
          f"best of {setting['repeat']}")  # fmt: skip
    show(title, heads, cells)


def perform(options: argparse.Namespace) -> int:
    if options.show:
        show_rows(read_rows(options.show), as_markdown=options.markdown)
        return 0
    try:
        if options.repeat < 1:
            raise ValueError(f"--repeat {options.repeat}: at least 1")
        asked = asked_of(options)
        problems = {kernel: PROBLEMS[kernel](options) for kernel in options.kernel}
    except (ValueError, NotImplementedError) as refusal:
        return refuse(refusal)
    rows = [setting_of(options), *rows_of(problems, asked, options.repeat)]
    show_rows(rows)
    if options.json:
        save_rows(options.json, rows)
    return 0
