"""What `run.py STEP` does: its kernels on some rows, and whether results are the reference's."""

from __future__ import annotations

import argparse
import time

import torch
from rich.console import Console

from lab.cases.steps import Problem, problems_of
from lab.flags.steps import NATIVE_ONLY
from lab.tools.common import finish, progress_bar, refuse
from lab.tools.place import Place, choose_place, emulated, instructions
from lab.tools.tables import show, table
from ptxemu.host.command_line import checking
from ptxemu.report import Report

COLUMNS = (
    ("problem", "{name}"), ("rows", "{tokens:,}"), ("bytes", "{nbytes:,}"), ("run as", "{backend}"),
    ("launches", "{launches}"), ("warp-instr.", "{instructions:,}"), ("seconds", "{seconds:.1f}"),
    ("", lambda row: row["wrong"] or "ok"),
)  # fmt: skip


def run(problem: Problem, place: Place, options: argparse.Namespace) -> dict:
    """A row: what it took, and what is wrong where something is."""
    arguments = problem.draw(options.seed, place.device)
    start = time.perf_counter()
    with emulated(options) as launches:
        outputs = problem.peers[problem.ours](*arguments)
        if place.backend == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        wrong = ""
        try:
            problem.check(arguments, outputs)
        except ValueError as error:
            wrong = str(error)
    counts = {"launches": len(launches), "instructions": instructions(launches)}
    return {**problem.sizes, "backend": place.backend, "seconds": seconds, **counts, "wrong": wrong}


def perform(options: argparse.Namespace) -> int:
    report = Report()
    try:
        place = choose_place(options)
        if place.backend != "cuda" and set(options.steps) & set(NATIVE_ONLY):
            raise ValueError(f"{options.steps[0]} needs a GPU and its bus: {place.reason}")
        problems = problems_of(
            options.family, options.steps, options.rows, options.hidden, options.names
        )
        with checking(options) as report, progress_bar(Console(stderr=True)) as bar:
            rows = [run(problem, place, options) for problem in bar.track(problems)]
    except (ValueError, NotImplementedError) as refused:
        return refuse(refused)
    show(*table(options.steps[0], COLUMNS, rows))
    return finish(options, report, {"rows": rows}, ok=not any(row["wrong"] for row in rows))
