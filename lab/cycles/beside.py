"""`cycles.py beside`: models kernels for the GPU on which they were timed."""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from cycle_model.binding.bound import BoundLaunch
from cycle_model.grid import LaunchModel, in_stream
from cycle_model.launch import bind
from cycle_model.parameters.parameter import Gpu
from cycle_model.sass.tools import HOW_TO_GET_TOOLS, find_tool
from lab.cycles import sample, subjects
from lab.cycles.measured import Call, Measured, measured_in
from lab.cycles.subjects import draw
from lab.tools.common import refuse, tracked, write_json
from lab.tools.tables import show, table
from ptxemu.errors import PtxEmuError
from ptxemu.watch import watched

FAR = 0.10  # two times that differ by more are a pair whose order counts
COLUMNS = (
    ("kernel", "{group}: {name}"),
    ("L2", "{memory}"),
    ("launches", "{launches}"),
    ("measured\nus", "{real_us:.2f}"),
    ("modelled\nus", "{modelled_us:.2f}"),
    ("range", lambda row: f"{row['low_us']:.2f} .. {row['high_us']:.2f}"),
    ("error", "{error:+.1%}"),
)
SUMMARY = (
    ("kernels", "{group}"),
    ("rows", "{rows}"),
    ("mean of abs", "{mape:.1%}"),
    ("median", "{median:.1%}"),
    ("bias", "{bias:+.1%}"),
    ("worst", "{worst:+.1%}"),
    ("pairs", "{pairs}"),
    ("in order", "{ordered:.1%}"),
)


def perform(options: argparse.Namespace) -> int:
    if find_tool("nvdisasm") is None:
        return refuse(HOW_TO_GET_TOOLS)
    try:
        subjects.check(options)
        problems = [each for path in options.files for each in measured_in(path)]
    except (ValueError, OSError) as refused:
        return refuse(refused)
    groups = list(dict.fromkeys(each.group for each in problems))
    for name in options.only or ():
        if name not in groups:
            return refuse(f"--only {name}: the files have {', '.join(groups)}")
    problems = [each for each in problems if each.group in (options.only or groups)]
    rows: list[dict[str, Any]] = []
    document = {"parameters": subjects.origin(options), "rows": rows}
    for problem in tracked(problems[:: options.every], "modelling"):
        rows.append(row_of(problem, options))
        if options.json:  # whoever stops here keeps what there is
            write_json(options.json, {**document, "summary": []})
    done = [row for row in rows if "refused" not in row]
    if not done:
        return refuse("no row could be modelled")
    show(*table("modelled and measured", COLUMNS, rows))
    subjects.told(options)
    sums = summary(done)
    show(*table("in all", SUMMARY, sums))
    if options.json:
        write_json(options.json, {**document, "summary": sums})
    if options.plot:
        draw(options.plot, done, "modelled and measured")
    return 0


def row_of(problem: Measured, options: argparse.Namespace) -> dict[str, Any]:
    """A problem, modelled; or why it is not."""
    row: dict[str, Any] = {
        "group": problem.group,
        "name": problem.name,
        "gpu": problem.gpu,
        "memory": problem.memory,
        "real_us": problem.us,
    }
    if (mib := problem.nbytes >> 20) > options.most_mib:
        return {**row, "refused": f"{mib} MiB, more than --most-mib {options.most_mib}"}
    began = time.perf_counter()
    try:
        gpu = subjects.gpu_of(options, problem.gpu)
        row["real_us"] = real = problem.microseconds(gpu.value("clock"))
        sets = [gpu, *(gpu.perturbed(seed) for seed in range(options.perturbed))]
        launches, (us, *rest) = (_of_blocks if problem.flags else _of_launches)(
            problem, sets, options
        )
    except (ValueError, NotImplementedError, PtxEmuError) as error:
        return {**row, "refused": f"{type(error).__name__}: {error}"}
    return {
        **row,
        "launches": launches,
        "modelled_us": us,
        "low_us": min([us, *rest]),
        "high_us": max([us, *rest]),
        "error": us / real - 1,
        "seconds": time.perf_counter() - began,
    }


def _of_launches(
    problem: Measured, sets: Sequence[Gpu], options: argparse.Namespace
) -> tuple[int, list[float]]:
    """Return the number of launches, and microseconds with each set of parameters."""
    bound = _bound(problem.make, options.limit, None if problem.whole else options.clusters)
    return len(bound), [
        _microseconds(bound, one, problem.memory) + problem.others * one.value("launch_least")
        for one in sets
    ]


def _of_blocks(
    problem: Measured, sets: Sequence[Gpu], options: argparse.Namespace
) -> tuple[int, list[float]]:
    """Return the number of launches and times of attention, from a few of its blocks, all at the
    clock of the first set."""
    clock, place = sets[0].value("clock"), {"arch": sets[0].arch, "memory": problem.memory}
    case = sample.case_options(problem.flags, argparse.Namespace(**place, given=()))
    return 1, sample.microseconds(sample.ours, case, [each.changed(clock=clock) for each in sets])


@lru_cache(maxsize=1)  # rows that differ in what is in L2 follow each other
def _bound(
    make: Callable[[], Call], limit: float, clusters: int | tuple[int, ...] | None
) -> tuple[BoundLaunch, ...]:
    """Return the launches of a call."""
    call = make()
    with watched(record=True, limit=limit, clusters=clusters) as report:
        call()
    recordings = [each.recording for each in report.launches if each.recording]
    return tuple(bind(each) for each in recordings if each.cubin)


def _microseconds(launches: Sequence[BoundLaunch], gpu: Gpu, memory: str) -> float:
    """Time of all of them, repeated as those that time them repeat them."""
    found = in_stream([LaunchModel(each, gpu, memory=memory) for each in launches])
    return sum(each.microseconds for each in found)


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per group, and one of all; pairs are those of a group and of the same memory."""
    groups = list(dict.fromkeys(row["group"] for row in rows))
    lines = [_of_group(group, [row for row in rows if row["group"] == group]) for group in groups]
    pairs = sum(line["pairs"] for line in lines)
    whole = _of_group("all", rows)
    right = sum(line["ordered"] * line["pairs"] for line in lines)
    return [*lines, {**whole, "pairs": pairs, "ordered": right / max(pairs, 1)}]


def _of_group(group: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    errors = [row["error"] for row in rows]
    pairs = [
        (one, other)
        for one, other in itertools.combinations(rows, 2)
        if one["memory"] == other["memory"]
        and abs(one["real_us"] - other["real_us"]) > FAR * min(one["real_us"], other["real_us"])
    ]
    right = sum(
        (one["real_us"] < other["real_us"]) == (one["modelled_us"] < other["modelled_us"])
        for one, other in pairs
    )
    return {
        "group": group,
        "rows": len(rows),
        "mape": statistics.fmean(map(abs, errors)),
        "median": statistics.median(map(abs, errors)),
        "bias": statistics.fmean(errors),
        "worst": max(errors, key=abs),
        "pairs": len(pairs),
        "ordered": right / max(len(pairs), 1),
    }
