"""What `run.py q8_0` does: operations on weights in both layouts, whether they are right, and
whether both have the same bits."""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from rich.console import Console

from lab.cases.q8_0 import Inputs, Problem, check, some_of
from lab.tools.common import finish, progress_bar, refuse
from lab.tools.place import Place, choose_place, emulated, instructions
from lab.tools.tables import show, table
from ptxemu.host.command_line import checking
from q8_0.launch import ARCHS

COLUMNS = (
    ("problem", "{problem}"), ("weights", "{peer}"), ("bytes", "{nbytes:,}"),
    ("run as", "{backend} {arch}"), ("launches", "{launches}"),
    ("warp-instr.", "{instructions:,}"), ("seconds", "{seconds:.1f}"), ("error", "{error:.1e}"),
    ("", lambda row: row["wrong"] or "ok"),
)  # fmt: skip
ERROR = "error: the largest one of a product over its largest result, beside fp64; limit 3.9e-03"


def run(problem: Problem, place: Place, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each layout: what it took, how exact it is, and what is wrong if something is."""
    inputs = Inputs.drawn(problem, options.seed, place.device)
    rows: list[dict[str, Any]] = []
    first = None
    for peer, call in inputs.calls(problem, **place.given).items():
        start = time.perf_counter()
        with emulated(options) as launches:
            result = call()
        if place.backend == "cuda":
            torch.cuda.synchronize()
        row = {"peer": peer, "backend": place.backend, "arch": place.arch}
        row |= {"seconds": time.perf_counter() - start, "launches": len(launches)}
        row |= {"instructions": instructions(launches), "wrong": ""}
        try:
            row["error"] = check(problem, inputs, peer, result)
            if first is not None and not torch.equal(first, result):
                raise ValueError(f"wrong: other bits than {rows[0]['peer']}")
        except ValueError as error:
            row["wrong"] = str(error)
        if problem.operation not in ("quantise", "repack"):
            first = result
        rows.append(problem.sizes | row)
    return rows


def perform(options: argparse.Namespace) -> int:
    try:
        place, problems, rows = choose_place(options, ARCHS), some_of(options), []
        with checking(options) as report, progress_bar(Console(stderr=True)) as bar:
            for problem in bar.track(problems):
                rows += run(problem, place, options)
    except (ValueError, NotImplementedError) as refused:
        return refuse(refused)
    show(*table("", COLUMNS, rows))
    print(ERROR)
    return finish(options, report, {"rows": rows}, ok=not any(row["wrong"] for row in rows))
