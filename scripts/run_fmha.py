"""Runs the attention kernel where it can run here and prints how exact it is: `make demo`.

A GPU of compute capability 10.x runs the kernel itself; everywhere else the emulator runs its PTX.
The yardstick is the fp64 definition, and beside each error stands the one that the reference with
the kernel's own rounding points makes. Exit code 1 when a case is out of tolerance.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from _cases import DTYPES, Case, shape
from fmha import reference
from kernelkit import tolerance
from ptxemu.options import POLICIES, Options

# Shapes that ask for something each: a plain tile, ragged tails, many heads on one, several tiles.
DEMO = (
    Case(1, 128, 128, 1, 1),
    Case(2, 200, 333, 4, 2),
    Case(1, 127, 129, 8, 1, dtype="fp16", mask="causal"),
    Case(1, 256, 512, 2, 1, mask="causal"),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """What one case measured. Errors are against fp64; `limit` is the tolerance at the worst place.

    relative: norm of the error over the norm of O. roles: warp-instructions per role.
    """

    case: str
    backend: str
    ok: bool
    max_error: float
    relative: float
    reference_error: float
    limit: float
    lse_error: float
    seconds: float
    roles: dict[str, int]


def pick_backend(wanted: str) -> tuple[str, str]:
    """(backend, the reason in words) for 'auto', 'cuda' or 'emulate'."""
    if wanted != "auto":
        return wanted, "as asked"
    if not torch.cuda.is_available():
        return "emulate", "no GPU here"
    name = torch.cuda.get_device_name()
    major, minor = torch.cuda.get_device_capability()
    if major == 10:
        return "cuda", name
    return "emulate", f"{name} is compute capability {major}.{minor}, the kernel needs 10.x"


def judge(case: Case, actual: tuple[torch.Tensor, torch.Tensor], slack: float) -> dict:
    """The errors of (O, LSE) and whether they are within `slack` times the tolerance."""
    q, k, v = case.inputs()
    causal = case.mask == "causal"
    exact = reference.definition(q, k, v, causal=causal)
    rounded = reference.rounded(q, k, v, causal=causal)
    o, lse = (tensor.cpu().double() for tensor in actual)
    verdicts = (
        tolerance.compare_output(o, exact.o, rounded.o, DTYPES[case.dtype]),
        tolerance.compare_lse(lse, exact.lse, rounded.lse),
    )
    error = (o - exact.o).abs()
    return {
        "ok": all(verdict.error <= slack * verdict.limit for verdict in verdicts),
        "max_error": error.max().item(),
        "relative": (error.norm() / exact.o.norm()).item(),
        "reference_error": verdicts[0].reference_error,
        "limit": slack * verdicts[0].limit,
        "lse_error": verdicts[1].error,
    }


def measure(case: Case, backend: str, options: Options, slack: float) -> Row:
    """Run one case and compare it. Seconds include compiling where its config is new."""
    start = time.perf_counter()
    actual, launches = attend(case, backend, options)
    seconds = time.perf_counter() - start
    return Row(
        case=str(case),
        backend=backend,
        seconds=seconds,
        roles=instructions_by_role(case, launches),
        **judge(case, actual, slack),
    )


def table(rows: list[Row]) -> Table:
    """The rows for a terminal."""
    result = Table(title="attention forward against the fp64 definition", title_justify="left")
    roles = list(dict.fromkeys(role for row in rows for role in row.roles))
    for name in ("case", "backend"):
        result.add_column(name, no_wrap=True)
    for name in (
        "max abs\nerror", "reference's\nrounding", "limit", "relative\nerror", "LSE\nerror",
        *(f"{role}\nwarp-instr." for role in roles), "seconds", "",
    ):
        result.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        errors = (row.max_error, row.reference_error, row.limit, row.relative, row.lse_error)
        result.add_row(
            row.case,
            row.backend,
            *(f"{error:.1e}" for error in errors),
            *(f"{row.roles.get(role, 0):,}" for role in roles),
            f"{row.seconds:.1f}",
            "[green]ok[/]" if row.ok else "[red]OUT[/]",
        )
    return result


def run_all(cases: list[Case], arguments: argparse.Namespace, console: Console) -> list[Row]:
    """Every case under a progress bar that counts the clusters of the running one."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    rows = []
    with Progress(*columns, console=console, transient=True) as progress:
        for case in cases:
            task = progress.add_task(str(case), total=None)
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


def write_json(path: Path, rows: list[Row], reason: str) -> None:
    """Rows and the setting they were taken in."""
    document = {
        "setting": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "machine": platform.machine(),
            "backend": reason,
        },
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=("auto", "cuda", "emulate"), default="auto")
    parser.add_argument(
        "--shape",
        type=shape,
        action="append",
        metavar="B,Sq,Skv,Hq,Hkv",
        help="run this shape (repeatable) instead of the demonstration's",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of --shape; default: bf16")
    parser.add_argument(
        "--mask", choices=("full", "causal"), default="full", help="of --shape; default: full"
    )
    parser.add_argument("--policy", choices=POLICIES, default="round-robin", help="of the emulator")
    parser.add_argument("--seed", type=int, default=0, help="of the policies with chance")
    parser.add_argument(
        "--tolerance", type=float, default=1.0, metavar="FACTOR", help="scales every limit"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there as well")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    arguments.backend, reason = pick_backend(arguments.backend)
    shapes = arguments.shape or ()
    cases = [Case(*s, dtype=arguments.dtype, mask=arguments.mask) for s in shapes] or list(DEMO)
    console = Console()
    console.print(f"backend: {arguments.backend} ({reason})")
    rows = run_all(cases, arguments, console)
    console.print(table(rows))
    if arguments.json:
        write_json(arguments.json, rows, reason)
    wrong = sum(not row.ok for row in rows)
    verdict = f"{wrong} of {len(rows)} out of tolerance" if wrong else "all within tolerance"
    console.print(f"{verdict} (2 x the reference's rounding + 1 ulp of the output)")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
