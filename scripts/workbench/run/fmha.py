"""What `run.py fmha` does: cases by the kernel where it can run here, and how exact they are."""

from __future__ import annotations

import argparse
import dataclasses
import os
import time

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from ptxemu.host.command_line import checking
from workbench.accuracy import ERRORS, cells, coarser, errors_of, table_of_cases
from workbench.cases.attention import attend, case_of, check, config_of, instructions_by_role
from workbench.common import describe, finish, refuse
from workbench.flags.attention import ARCHS, DEMO
from workbench.place import Place, choose_place
from workbench.problems.attention import DTYPES, Case, references

# Each asks for something else: ragged tails under causal; a window whose gap to the first keys is
# skipped; decoding with packed heads from pages; packed sequences of a model with softcap.
DEMONSTRATION = (
    Case(200, 333, (2, 1), causal=True),
    Case(100, 700, dtype="fp16", window=(128, 0), sink_tokens=4),
    Case(1, 300, (8, 1), 2, dims=(128, 128), sinks=True, page_size=64, kv_lens=(300, 77)),
    Case(60, 200, (2, 1), 2, softcap=20.0, q_lens=(30, 60), k_lens=(100, 200), out_dtype="fp32"),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """What one case measured; errors are against fp64.

    reference_error: max abs error of plain torch with the kernel's rounding points.
    of_limit: worst error of O or LSE as a share of what is tolerated at its place.
    relative: norm of the error over the norm of O.
    config: what was compiled, where it differs from the default.
    roles: warp-instructions per role, where the emulator counted them.
    """

    case: str
    config: str
    backend: str
    max_error: float
    reference_error: float
    of_limit: float
    relative: float
    lse_error: float
    seconds: float
    roles: dict[str, int]

    @property
    def ok(self) -> bool:
        """Within the tolerance."""
        return self.of_limit <= 1.0


def judge(case: Case, actual: tuple[torch.Tensor, torch.Tensor], slack: float) -> dict:
    """The errors of (O, LSE), and what share of `slack` times the tolerance they take up."""
    pairs = [(result.o, result.lse) for result in references(case)]
    grain = coarser((case.io, DTYPES[case.out_dtype or case.dtype]))
    return errors_of(actual, *pairs, grain, slack)


def measure(case: Case, place: Place, options: argparse.Namespace, **more: object) -> Row:
    """Run one case and compare it. Seconds include compiling where its config is new; more: fields
    of the emulator's options."""
    start = time.perf_counter()
    actual, launches = attend(case, place, options, **more)
    seconds = time.perf_counter() - start
    return Row(
        case=" ".join(case.words()),
        config=describe(config_of(case)),
        backend=place.backend,
        seconds=seconds,
        roles=instructions_by_role(case, launches),
        **judge(case, actual, options.tolerance),
    )


def accuracy(rows: list[Row]) -> Table:
    """Errors against fp64, for a terminal of 80 columns."""
    table = table_of_cases("\nbackend", *ERRORS, "")
    for row in rows:
        table.add_row(row.case, row.backend, *cells(dataclasses.asdict(row)))
    return table


def work(rows: list[Row]) -> Table:
    """Seconds, and warp-instructions per role where the emulator counted them."""
    roles = list(dict.fromkeys(role for row in rows for role in row.roles))
    table = table_of_cases(*(f"{role}\nwarp-instr." for role in roles), "\nseconds")
    for row in rows:
        counts = (f"{row.roles.get(role, 0):,}" for role in roles)
        table.add_row(row.case, *counts, f"{row.seconds:.1f}")
    return table


def run_all(
    cases: list[Case], place: Place, options: argparse.Namespace, console: Console
) -> list[Row]:
    """Every case under a progress bar that counts the clusters of the running one."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    rows = []
    with Progress(*columns, console=console, transient=True) as progress:
        for number, case in enumerate(cases, start=1):
            task = progress.add_task(
                f"{number} of {len(cases)}: {' '.join(case.words())}", total=None
            )

            def seen(done: int, total: int, task: TaskID = task) -> None:
                progress.update(task, completed=done, total=total)

            rows.append(measure(case, place, options, progress=seen))
            progress.remove_task(task)
    return rows


def chosen(options: argparse.Namespace) -> list[Case]:
    """The cases that the flags spell; none spelt means the demonstration. Raises what `attention`
    raises of one of them."""
    cases = [case_of(options, shape) for shape in options.shape or [()]]
    batch, sq, skv, *heads = DEMO.values()
    if cases == [Case(sq, skv, tuple(heads), batch)] and not options.shape:
        cases = list(DEMONSTRATION)
    for case in cases:
        check(case)
    return cases


def perform(options: argparse.Namespace) -> int:
    """What the flags ask for; returns the exit code."""
    if options.line_info:
        os.environ["CUTE_DSL_LINEINFO"] = "1"  # read when the DSL is imported, at the first compile
    try:
        cases, place = chosen(options), choose_place(options, ARCHS)
    except (ValueError, NotImplementedError) as refused:
        return refuse(refused)
    console = Console()
    console.print(f"backend: {place.backend} ({place.reason})")
    with checking(options) as report:
        rows = run_all(cases, place, options, console)
    console.print(accuracy(rows), work(rows))
    wrong = sum(not row.ok for row in rows)
    verdict = f"{wrong} of {len(rows)} out of tolerance" if wrong else "all within tolerance"
    console.print("reference: plain torch with the kernel's roundings; limit: 2 x that + 1 ulp")
    console.print(verdict)
    written = [{**dataclasses.asdict(row), "ok": row.ok} for row in rows]
    return finish(options, report, {"backend": place.reason, "rows": written}, ok=not wrong)
