"""What `run.py gqa` does: a decode case, how exact it is, and on a GPU how long it takes."""

from __future__ import annotations

import argparse
import dataclasses
import time
from functools import partial
from typing import Any

import torch
from rich.console import Console

from gqa_lowlatency import DecodeConfig, decode, decode_plan, reference
from gqa_lowlatency.launch import ARCHS
from lab.cases.decode import DTYPES, Case, case_of
from lab.measure.accuracy import ERRORS, LIMIT, coarser, errors_of
from lab.measure.timing import Launch, calls, cold_and_warm, figures, sets_here
from lab.tools import tables
from lab.tools.common import finish, refuse
from lab.tools.place import Place, choose_place, emulated, instructions
from ptxemu.host.command_line import checking

REFERENCE_KNOWS = {field.name for field in dataclasses.fields(reference.Options)}


def run(case: Case, place: Place, options: argparse.Namespace) -> dict[str, Any]:
    """Results of one case, the seconds until they were there, and GPU times where there is one."""
    tensors = [tensor.to(place.device) for tensor in case.tensors]
    given = {name: table.to(place.device) for name, table in case.tables.items()}
    config = DecodeConfig(**({"cluster": 0} | case.tuning)) if case.tuning else None
    moving = {name: given[name] for name in ("kv_lens", "page_table") if name in given}
    given |= {**case.options, **place.given, "config": config}
    start = time.perf_counter()
    with emulated(options) as launches:
        results = decode(*tensors, return_lse=True, **given)
    if place.backend == "cuda":
        torch.cuda.synchronize()
    found = {"results": results, "seconds": time.perf_counter() - start}
    if place.backend != "cuda":
        return found | {"instructions": instructions(launches)}
    plan = decode_plan(*tensors, **given)

    def launch_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Launch:
        out, lse = (torch.empty_like(result) for result in results)
        return partial(plan, q, k, v, **moving, out=out, lse=lse)

    sets = sets_here(sum(tensor.nbytes for tensor in tensors))
    copies = ([tensor.clone() for tensor in tensors] for _ in range(sets - 1))
    steps = [launch_of(*some) for some in (tensors, *copies)]
    return found | figures(cold_and_warm(steps) | {"host": calls(steps[0])})


def judged(case: Case, place: Place, options: argparse.Namespace) -> dict[str, Any]:
    """A row of the tables: errors, and what `run` found beside the results."""
    found = run(case, place, options)
    result = found.pop("results")
    changes = {name: value for name, value in case.options.items() if name in REFERENCE_KNOWS}
    given = case.tables | changes | {"arch": case.arch}
    exact, rounded = (
        judge(*case.tensors, **given) for judge in (reference.definition, reference.rounded)
    )
    grain = coarser((DTYPES[case.dtype], result[0].dtype))
    pairs = (exact.o, exact.lse), (rounded.o, rounded.lse)
    errors = errors_of(result, *pairs, grain, options.tolerance)
    return {"case": str(case), "backend": place.backend, "arch": place.arch, **errors, **found}


def show(row: dict[str, Any], console: Console) -> None:
    """Errors, and beside them the time of a launch or the work of the emulator."""
    cost = (("warp-\ninstr.", "{instructions:,}"), ("\nseconds", "{seconds:.1f}"))
    if "warm_us" in row:
        cost = tuple((f"{name}\nus", f"{{{name}_us:.1f}}") for name in ("warm", "cold", "host"))
    columns = (("\ncase", "{case}"), ("\nrun as", "{backend}\n{arch}"), *ERRORS, *cost)
    tables.show(*tables.table("", columns, [row]), console)


def perform(options: argparse.Namespace) -> int:
    console = Console()
    try:
        place = choose_place(options, ARCHS)
        options.arch = place.arch
        case = case_of(options)
        with checking(options) as report:
            row = judged(case, place, options)
    except (ValueError, NotImplementedError) as refused:
        return refuse(refused)
    show(row, console)
    right = row["of_limit"] <= 1.0
    console.print(LIMIT)
    console.print("within tolerance" if right else "out of tolerance")
    return finish(options, report, {"row": {**row, "ok": right}}, ok=right)
