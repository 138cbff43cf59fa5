"""What run_gqa.py does: a decode case, how exact it is, and on a GPU how long it takes."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.console import Console

from gqa_lowlatency import DecodeConfig, decode, decode_plan, reference
from kernelkit.launch import emulation, written_for
from ptxemu.check import text
from ptxemu.host.command_line import checking, wanted
from ptxemu.options import Options
from workbench.accuracy import ERRORS, cells, coarser, errors_of, table_of_cases
from workbench.cases.decode import DTYPES, Case, case_of, native_arch
from workbench.common import refuse, write_json
from workbench.timing import measure, setting

ROWS, LAUNCHES = 10, 200


def run(case: Case, backend: str, options: Options) -> dict[str, Any]:
    """Results of one case, the seconds until they were there, and GPU times where there is one."""
    device = "cuda" if backend == "cuda" else "cpu"
    tensors = [tensor.to(device) for tensor in case.tensors]
    tables = {name: table.to(device) for name, table in case.tables.items()}
    config = DecodeConfig(**case.tuning) if case.tuning else None
    arch = None if backend == "cuda" else case.arch
    given = {**tables, **case.options, "arch": arch, "backend": backend, "config": config}
    start = time.perf_counter()
    with emulation(options) as emulated:
        results = decode(*tensors, return_lse=True, **given)
    if backend == "cuda":
        torch.cuda.synchronize()
    found = {"results": results, "seconds": time.perf_counter() - start}
    if backend != "cuda":
        launches = [launch for report in emulated.reports for launch in report.launches]
        counts = [count.total() for launch in launches for count in launch.by_warp.values()]
        return found | {"instructions": sum(counts)}
    plan = decode_plan(*tensors, **given)
    moving = {name: tables[name] for name in ("seq_lens", "page_table") if name in tables}
    out, lse = (torch.empty_like(result) for result in results)
    launch = partial(plan, *tensors, **moving, out=out, lse=lse)
    times = measure(launch)
    return found | {
        "warm_us": times.warm * 1e6, "cold_us": times.cold * 1e6, "host_us": host_us(launch),
    }  # fmt: skip


def host_us(launch: Callable[[], object]) -> float:
    """What a launch costs the host: the best of several rows that fit the queue of the GPU."""
    rows = []
    for _ in range(ROWS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(LAUNCHES):
            launch()
        rows.append((time.perf_counter() - start) / LAUNCHES)
    torch.cuda.synchronize()
    return min(rows) * 1e6


def judged(case: Case, backend: str, options: Options, slack: float) -> dict[str, Any]:
    """A row of the tables: errors, and what `run` found beside the results."""
    found = run(case, backend, options)
    result = found.pop("results")
    changes = {name: value for name, value in case.options.items() if name in REFERENCE_KNOWS}
    given = case.tables | changes | {"arch": written_for(case.arch)}
    exact, rounded = (
        judge(*case.tensors, **given) for judge in (reference.definition, reference.rounded)
    )
    grain = coarser((DTYPES[case.dtype], result[0].dtype))
    pairs = (exact.o, exact.lse), (rounded.o, rounded.lse)
    errors = errors_of(result, *pairs, grain, slack)
    return {"case": str(case), "backend": backend, "arch": case.arch, **errors, **found}


REFERENCE_KNOWS = {field.name for field in dataclasses.fields(reference.Options)}


def show(row: dict[str, Any], console: Console) -> None:
    """Errors, and beside them the time of a launch or the work of the emulator."""
    on_gpu = "warm_us" in row
    columns = ("warp-\ninstr.", "\nseconds")
    if on_gpu:
        columns = ("warm\nus", "cold\nus", "host\nus")
    table = table_of_cases("\nrun as", *ERRORS, "", *columns)
    numbers = [f"{row.get('instructions', 0):,}", f"{row['seconds']:.1f}"]
    if on_gpu:
        numbers = [f"{row[name]:.1f}" for name in ("warm_us", "cold_us", "host_us")]
    table.add_row(row["case"], f"{row['backend']}\n{row['arch']}", *cells(row), *numbers)
    console.print(table)


def choose_place(arguments: argparse.Namespace) -> None:
    """Backend and arch for 'auto' and none: the GPU's where there is one, else the emulator."""
    native = native_arch()
    if arguments.backend == "auto":
        asked = wanted(arguments) or arguments.arch not in (None, written_for(native))
        arguments.backend = "emulate" if asked or native is None else "cuda"
    if arguments.backend == "cuda":
        if native is None:
            raise ValueError("backend 'cuda': no GPU of compute capability 9.0 or 10.x here")
        if wanted(arguments):
            raise ValueError("backend 'cuda': the checker is the emulator's")
        arguments.arch = native
    arguments.arch = arguments.arch or "sm_100a"


def perform(arguments: argparse.Namespace) -> int:
    """What the flags ask for; returns the exit code."""
    console = Console()
    options = Options(policy=arguments.policy, seed=arguments.seed, limit=None)
    try:
        choose_place(arguments)
        case = case_of(arguments)
        with checking(arguments) as report:
            row = judged(case, arguments.backend, options, arguments.tolerance)
    except (ValueError, NotImplementedError) as refused:
        return refuse(refused)
    show(row, console)
    right = row["of_limit"] <= 1.0
    if arguments.json:
        checks = {"checks": text.document(report, counts=False)} if wanted(arguments) else {}
        write_json(arguments.json, {"setting": setting(), "row": {**row, "ok": right}, **checks})
    console.print("reference: plain torch with the kernel's roundings; limit: 2 x that + 1 ulp")
    console.print("within tolerance" if right else "out of tolerance")
    return 0 if right and not report.errors else 1
