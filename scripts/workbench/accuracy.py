"""How exact a kernel was, in numbers and in a table: what the run scripts share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from kernelkit import tolerance

TINY = torch.finfo(torch.float64).tiny  # an output of zeros has no relative error
ERRORS = ("max abs\nerror", "refer-\nence", "of\nlimit", "relative\nerror", "LSE\nerror")

Outputs = tuple[torch.Tensor, torch.Tensor]


def errors_of(
    actual: Outputs, exact: Outputs, rounded: Outputs, grain: torch.dtype, slack: float = 1.0
) -> dict[str, float]:
    """Of (O, LSE) against fp64, and what share of `slack` times the tolerance they take up."""
    o, lse = (tensor.cpu().double() for tensor in actual)
    verdicts = (
        tolerance.compare_output(o, exact[0], rounded[0], grain),
        tolerance.compare_lse(lse, exact[1], rounded[1]),
    )
    error = (o - exact[0]).abs()
    return {
        "max_error": max(error.flatten().tolist(), default=0.0),
        "reference_error": verdicts[0].reference_error,
        "of_limit": max(_share(verdict, slack) for verdict in verdicts),
        "relative": (error.norm() / exact[0].norm().clamp_min(TINY)).item(),
        "lse_error": verdicts[1].error,
    }


def coarser(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """The one with the largest steps."""
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def _share(verdict: tolerance.Report, slack: float) -> float:
    """Error over limit; infinite where NaNs or infinities disagree, which no limit excuses."""
    if verdict.limit == 0.0:
        return 0.0 if verdict.ok else math.inf
    return verdict.error / (slack * verdict.limit)


def cells(errors: dict[str, float]) -> list[str]:
    """The errors under the headings of ERRORS, and a verdict."""
    share = errors["of_limit"]
    return [
        f"{errors['max_error']:.1e}",
        f"{errors['reference_error']:.1e}",
        f"{share:.0%}" if share < 10 else "> 999%",
        f"{errors['relative']:.1e}",
        f"{errors['lse_error']:.1e}",
        "[green]ok[/]" if share <= 1.0 else "[red]OUT[/]",
    ]


def table_of_cases(*columns: str) -> Table:
    """A table with a first column for the case, which is the one that folds where it is narrow."""
    table = Table("\ncase", box=SIMPLE_HEAD, padding=0, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table
