"""Accuracy of a kernel, as numbers and as table columns; shared by the run scripts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kernelkit.numerics import tolerance

# Of the reference's own error of a layer of experts: ties that fall otherwise, and a sigmoid that
# is approximated.
EXTRA = 1.02
TINY = torch.finfo(torch.float64).tiny  # an output of zeros has no relative error

Outputs = tuple[torch.Tensor, torch.Tensor]


def errors_of(
    actual: Outputs, exact: Outputs, rounded: Outputs, grain: torch.dtype, slack: float = 1.0
) -> dict[str, float]:
    """Errors of (O, LSE) against fp64, and what share of `slack` times the tolerance they take
    up."""
    narrow = actual[0].dtype == torch.float8_e4m3fn
    compare_o = tolerance.compare_e4m3 if narrow else tolerance.compare_output
    o, lse = (tensor.cpu().double() for tensor in actual)
    verdicts = (
        compare_o(o, exact[0], rounded[0], grain),
        tolerance.compare_lse(lse, exact[1], rounded[1]),
    )
    error = (o - exact[0]).abs()
    return {
        "max_error": max(error.flatten().tolist(), default=0.0),
        "reference_error": verdicts[0].reference_error,
        "of_limit": max(share(verdict, slack) for verdict in verdicts),
        "relative": (error.norm() / exact[0].norm().clamp_min(TINY)).item(),
        "lse_error": verdicts[1].error,
    }


def coarser(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """Return the one with the largest steps but e4m3, to which `tolerance.compare_e4m3` rounds."""
    wide = (dtype for dtype in dtypes if dtype != torch.float8_e4m3fn)
    return max(wide, key=lambda dtype: torch.finfo(dtype).eps)


def share(verdict: tolerance.Report, slack: float = 1.0) -> float:
    """Error over limit; infinite where NaNs or infinities disagree, which no limit excuses."""
    if verdict.limit == 0.0:
        return 0.0 if verdict.ok else math.inf
    return verdict.error / (slack * verdict.limit)


# What the tables of cases say of their errors.
ERRORS = (
    ("max abs\nerror", "{max_error:.1e}"),
    ("refer-\nence", "{reference_error:.1e}"),
    ("of\nlimit", lambda row: f"{row['of_limit']:.0%}" if row["of_limit"] < 10 else "> 999%"),
    ("relative\nerror", "{relative:.1e}"),
    ("LSE\nerror", "{lse_error:.1e}"),
    ("", lambda row: "ok" if row["of_limit"] <= 1.0 else "OUT"),
)
LIMIT = "reference: plain torch with the kernel's roundings; limit: 2 x that + 1 ulp"
