"""What `run.py fmha` does: cases by the kernel where it can run here, and how exact they are."""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch
from rich.console import Console
from rich.progress import TaskID

from fmha.launch import ARCHS
from lab.cases.attention import attend, case_of, check, config_of, instructions_by_role
from lab.flags.attention import DEMO
from lab.measure.accuracy import ERRORS, LIMIT, errors_of
from lab.problems.attention import Case, references
from lab.tools import tables
from lab.tools.common import describe, finish, progress_bar, refuse
from lab.tools.place import Place, choose_place
from ptxemu.host.command_line import checking

# Each asks for something else: ragged tails under causal; a window whose gap to the first keys is
# skipped; decoding with packed heads from pages; packed sequences of a model with softcap.
DEMONSTRATION = (
    Case(200, 333, (2, 1), causal=True),
    Case(100, 700, dtype="fp16", window=(128, 0), sink_tokens=4),
    Case(1, 300, (8, 1), 2, dims=(128, 128), sinks=True, page_size=64, kv_lens=(300, 77)),
    Case(60, 200, (2, 1), 2, softcap=20.0, q_lens=(30, 60), k_lens=(100, 200), out_dtype="fp32"),
)


def judge(
    case: Case, actual: tuple[torch.Tensor, torch.Tensor], slack: float, device: str = "cpu"
) -> dict:
    """The errors of (O, LSE), and what share of `slack` times the tolerance they take up. device:
    that they were computed on, where the references are, too."""
    results = references(case, case.inputs(device), aligned_sums=device == "cuda")
    pairs = [(result.o.cpu(), result.lse.cpu()) for result in results]
    return errors_of(actual, *pairs, case.coarsest, slack)


def measure(
    case: Case, place: Place, options: argparse.Namespace, **more: object
) -> dict[str, Any]:
    """A row: one case is run and compared with fp64.

    config: what was compiled, where it differs from the default. Seconds include compiling where it
    is new. roles: warp-instructions of each, where the emulator counted them. more: fields of the
    emulator's options. `lab.measure.accuracy` has the errors.
    """
    start = time.perf_counter()
    actual, launches = attend(case, place, options, **more)
    seconds = time.perf_counter() - start
    errors = {} if options.unjudged else judge(case, actual, options.tolerance, place.device)
    return {
        "case": " ".join(case.words()),
        "config": describe(config_of(case, place.arch)),
        "backend": place.backend,
        **errors,
        "seconds": seconds,
        "roles": instructions_by_role(case, place.arch, launches),
        "ok": options.unjudged or errors["of_limit"] <= 1.0,
    }


def show(rows: list[dict], console: Console) -> None:
    """Errors against fp64, for a terminal of 80 columns; then seconds, and warp-instructions per
    role where the emulator counted them."""
    case = ("\ncase", "{case}")
    tables.show(*tables.table("", (case, ("\nbackend", "{backend}"), *ERRORS), rows), console)
    roles = dict.fromkeys(role for row in rows for role in row["roles"])
    counts = ((f"{role}\nwarp-instr.", f"{{roles[{role}]:,}}") for role in roles)
    tables.show(*tables.table("", (case, *counts, ("\nseconds", "{seconds:.1f}")), rows), console)


def run_all(
    cases: list[Case], place: Place, options: argparse.Namespace, console: Console
) -> list[dict]:
    """Every case under a progress bar that counts the clusters of the running one."""
    rows = []
    with progress_bar(console) as progress:
        for number, case in enumerate(cases, start=1):
            words = f"{number} of {len(cases)}: {' '.join(case.words())}"
            task = progress.add_task(words, total=None)

            def seen(done: int, total: int, task: TaskID = task) -> None:
                progress.update(task, completed=done, total=total)

            rows.append(measure(case, place, options, progress=seen))
            progress.remove_task(task)
    return rows


def chosen(options: argparse.Namespace, arch: str) -> list[Case]:
    """The cases that the flags spell; none spelt means the demonstration. Raises what `attention`
    raises of one of them."""
    cases = [case_of(options, shape) for shape in options.shape or [()]]
    batch, sq, skv, *heads = DEMO.values()
    if cases == [Case(sq, skv, tuple(heads), batch)] and not options.shape:
        cases = list(DEMONSTRATION)
    for case in cases:
        check(case, arch)
    return cases


def perform(options: argparse.Namespace) -> int:
    if options.line_info:
        os.environ["CUTE_DSL_LINEINFO"] = "1"  # read when the DSL is imported, at the first compile
    try:
        place = choose_place(options, ARCHS)
        cases = chosen(options, place.arch)
    except (ValueError, NotImplementedError) as refused:
        return refuse(refused)
    console = Console()
    console.print(f"backend: {place.backend} ({place.reason})")
    with checking(options) as report:
        rows = run_all(cases, place, options, console)
    show(rows, console)
    wrong = sum(not row["ok"] for row in rows)
    verdict = f"{wrong} of {len(rows)} out of tolerance" if wrong else "all within tolerance"
    console.print("nothing was compared" if options.unjudged else f"{LIMIT}\n{verdict}")
    return finish(options, report, {"backend": place.reason, "rows": rows}, ok=not wrong)
