"""Run and judge decode problems in the emulator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from gqa_lowlatency import decode
from kernelkit.call.launch import emulation
from kernelkit.numerics import tolerance
from lab.problems.attention import PATIENCE, same_bits
from lab.problems.decode import Case, judge
from ptxemu import Options
from ptxemu.check.text import render

FRIENDLY = Options(policy="round-robin", limit=PATIENCE)


@contextmanager
def watched(schedule: Options) -> Iterator[None]:
    """Within the block the emulator launches by `schedule`, and the checker must report nothing."""
    with emulation(schedule) as active:
        yield
    for report in active.reports:
        assert not report.findings, render(report)


def run(
    case: Case, arch: str, schedule: Options = FRIENDLY, **changes: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (O, LSE) of the kernel in the emulator. changes: replaced arguments of decode."""
    arguments = case.options() | case.launch_options(arch) | changes
    with watched(schedule):
        return decode(*case.inputs(), return_lse=True, **arguments)


def expect(reports: Sequence[tolerance.Report]) -> None:
    """Assert that all are within tolerance."""
    for report in reports:
        assert report.ok, str(report)


def check(case: Case, arch: str, *schedules: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the results, after checking that they are right and have equal bits in every
    schedule."""
    results = run(case, arch, schedules[0])
    expect(judge(case, arch, results))
    for schedule in schedules[1:]:
        other = run(case, arch, schedule)
        assert same_bits(results, other), f"{schedule.policy} changes bits"
    return results
