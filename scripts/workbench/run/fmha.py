"""What run_fmha.py does: cases by the kernel where it can run here, and how exact they are."""

from __future__ import annotations

import argparse
import dataclasses
import os
import time

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fmha import reference
from ptxemu.check import text
from ptxemu.host.command_line import checking, wanted
from ptxemu.options import Options
from workbench.accuracy import ERRORS, cells, coarser, errors_of, table_of_cases
from workbench.cases.attention import (
    DTYPES,
    OUT_DTYPES,
    Case,
    attend,
    case_of,
    check,
    config_of,
    instructions_by_role,
)
from workbench.common import describe, refuse, write_json
from workbench.timing import setting, why_not_here

# Each asks for something else: ragged tails under causal; a window whose gap to the first keys is
# skipped; decoding with packed heads from pages; packed sequences of a model with softcap.
DEMO = (
    Case(1, 200, 333, 2, 1, causal=True),
    Case(1, 100, 700, 1, 1, dtype="fp16", window=(128, 0), sink_tokens=4),
    Case(2, 1, 300, 8, 1, head_dim=128, sinks=True, page_size=64, kv_lens=(300, 77)),
    Case(2, 60, 200, 2, 1, softcap=20.0, packed="qk", out_dtype="fp32"),
)
DEFAULT_SHAPE = (2, 200, 333, 4, 2)  # of a case that is spelt without one


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


def pick_backend(asked: str, *, checked: bool) -> tuple[str, str]:
    """(backend, the reason in words) for 'auto', 'cuda' or 'emulate'."""
    reason = why_not_here()
    if asked == "cuda" and checked:
        raise ValueError("backend 'cuda': the checker is the emulator's")
    if asked == "cuda" and reason:
        raise ValueError(f"backend 'cuda': {reason}")
    if asked != "auto":
        return asked, "as asked"
    if checked:
        return "emulate", "for the checker"
    return ("emulate", reason) if reason else ("cuda", torch.cuda.get_device_name())


def judge(case: Case, actual: tuple[torch.Tensor, torch.Tensor], slack: float) -> dict:
    """The errors of (O, LSE), and what share of `slack` times the tolerance they take up."""
    inputs, options = case.inputs(), case.options() | {"normalize": True}
    exact, rounded = (
        judge(*inputs, **options) for judge in (reference.definition, reference.rounded)
    )
    pairs = (exact.o, exact.lse), (rounded.o, rounded.lse)
    return errors_of(actual, *pairs, grain(case), slack)


def grain(case: Case) -> torch.dtype:
    """The coarser of the dtypes that O passes through."""
    dtypes = (DTYPES[case.dtype], OUT_DTYPES.get(case.out_dtype, DTYPES[case.dtype]))
    return coarser(dtypes)


def measure(case: Case, backend: str, options: Options, slack: float) -> Row:
    """Run one case and compare it. Seconds include compiling where its config is new."""
    start = time.perf_counter()
    actual, launches = attend(case, backend, options)
    seconds = time.perf_counter() - start
    return Row(
        case=str(case),
        config=describe(config_of(case)),
        backend=backend,
        seconds=seconds,
        roles=instructions_by_role(case, launches),
        **judge(case, actual, slack),
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


def run_all(cases: list[Case], arguments: argparse.Namespace, console: Console) -> list[Row]:
    """Every case under a progress bar that counts the clusters of the running one."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    rows = []
    with Progress(*columns, console=console, transient=True) as progress:
        for number, case in enumerate(cases, start=1):
            task = progress.add_task(f"{number} of {len(cases)}: {case}", total=None)
            options = Options(
                policy=arguments.policy,
                seed=arguments.seed,
                limit=None,
                progress=lambda done, total, task=task: progress.update(
                    task, completed=done, total=total
                ),
            )
            rows.append(measure(case, arguments.backend, options, arguments.tolerance))
            progress.remove_task(task)
    return rows


def document(rows: list[Row], reason: str) -> dict:
    """Rows and the setting they were taken in."""
    return {
        "setting": {**setting(), "backend": reason},
        "rows": [{**dataclasses.asdict(row), "ok": row.ok} for row in rows],
    }


def chosen(arguments: argparse.Namespace) -> list[Case]:
    """The cases that the flags spell; none spelt means the demonstration."""
    shapes = arguments.shape or [DEFAULT_SHAPE]
    cases = [case_of(arguments, shape) for shape in shapes]
    return list(DEMO) if cases == [Case(*DEFAULT_SHAPE)] and not arguments.shape else cases


def refusal(cases: list[Case]) -> str | None:
    """Why the first case that `attention` refuses is refused."""
    for case in cases:
        try:
            check(case)
        except (ValueError, NotImplementedError) as error:
            return f"{case}: {error}"
    return None


def perform(arguments: argparse.Namespace) -> int:
    """What the flags ask for; returns the exit code."""
    cases = chosen(arguments)
    reason = refusal(cases)
    if reason:
        return refuse(reason)
    if arguments.line_info:
        os.environ["CUTE_DSL_LINEINFO"] = "1"  # read when the DSL is imported, at the first compile
    try:
        arguments.backend, reason = pick_backend(arguments.backend, checked=wanted(arguments))
    except ValueError as refused:
        return refuse(str(refused))
    console = Console()
    console.print(f"backend: {arguments.backend} ({reason})")
    with checking(arguments) as report:
        rows = run_all(cases, arguments, console)
    console.print(accuracy(rows), work(rows))
    if arguments.json:
        checks = {"checks": text.document(report, counts=False)} if wanted(arguments) else {}
        write_json(arguments.json, {**document(rows, reason), **checks})
    wrong = sum(not row.ok for row in rows)
    verdict = f"{wrong} of {len(rows)} out of tolerance" if wrong else "all within tolerance"
    console.print("reference: plain torch with the kernel's roundings; limit: 2 x that + 1 ulp")
    console.print(verdict)
    return 1 if wrong or report.errors else 0
