"""What `run.py` does for every family: problems are run, timed where there is a GPU, and judged."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from kernelkit.call.ranges import nvtx_range
from lab.measure.timing import figures
from lab.problems.attention import same_bits
from lab.problems.family import Problem, family_of, is_right
from lab.tools.common import finish, progress_bar, refuse
from lab.tools.place import Place, choose_place, emulated, instructions
from ptxemu.host.command_line import checking

Seen = Callable[[int, int], None]  # clusters of a launch that are done, and all of them


def measure(
    problem: Problem, place: Place, options: argparse.Namespace, seen: Seen | None = None
) -> list[dict[str, Any]]:
    """A row for each of the problem's calls: where it ran, how long it took, and its errors.

    Seconds include compiling where a kernel is new."""
    drawn = problem.draw(options.seed, place.device)
    rows: list[dict[str, Any]] = []
    first: Any = None
    for name, call in problem.calls(drawn, place).items():
        start = time.perf_counter()
        with emulated(options, progress=seen) as launches, nvtx_range(str(problem)):
            results = call()
            if place.backend == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            found = judged(problem, drawn, name, results, options)
        if problem.alike:
            if first is not None and not same_bits([first], [results]):
                found["wrong"] = found["wrong"] or f"wrong: bits differ from {rows[0]['peer']}"
            first = results
        if place.backend == "cuda" and (samples := problem.samples(drawn, results, place)):
            found |= figures(samples)
        work = {"launches": len(launches), "instructions": instructions(launches)}
        where = {"backend": place.backend, "arch": place.arch, "seconds": seconds}
        peer = {"peer": name} if name else {}
        rows.append(problem.sizes | peer | where | work | problem.work(launches, place) | found)
    return rows


def judged(
    problem: Problem, drawn: Any, name: str, results: Any, options: argparse.Namespace
) -> dict[str, Any]:
    """Errors of a call, or why its result is wrong."""
    if getattr(options, "unjudged", False):
        return {"ok": True}
    try:
        return problem.judge(drawn, name, results, getattr(options, "tolerance", 1.0))
    except ValueError as error:
        return {"wrong": str(error)}


def measure_all(
    problems: list[Problem], place: Place, options: argparse.Namespace, progress: Progress
) -> list[dict[str, Any]]:
    """Every problem under a bar that counts the clusters of the launch that runs."""
    rows = []
    for number, problem in enumerate(problems, start=1):
        task = progress.add_task(f"{number} of {len(problems)}: {problem}", total=None)

        def seen(done: int, total: int, task: Any = task) -> None:
            progress.update(task, completed=done, total=total)

        rows += measure(problem, place, options, seen)
        progress.remove_task(task)
    return rows


def perform(options: argparse.Namespace) -> int:
    if getattr(options, "line_info", False):
        os.environ["CUTE_DSL_LINEINFO"] = "1"  # read when the DSL is imported, at the first compile
    family = family_of(options)
    try:
        place = choose_place(options, family.archs(options))
        problems = [*family.problems(options, place)]
        if family.says_where:
            Console().print(f"backend: {place.backend} ({place.reason})")
        with checking(options) as report, progress_bar(Console(stderr=True)) as progress:
            rows = measure_all(problems, place, options, progress)
    except (ValueError, NotImplementedError) as refused:
        return refuse(refused)
    document = family.tell(rows, options, place)
    return finish(options, report, document, ok=all(map(is_right, rows)))
