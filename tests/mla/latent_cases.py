"""Run and judge problems of attention to latent keys in the emulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lab.problems.attention import PATIENCE, same_bits
from lab.problems.latent import Case, Dense, senders_of
from mla import decode, sparse_decode
from ptxemu import Options
from tests.gqa_lowlatency.cases import expect, watched

CHECKED = Options(policy="round-robin", check=True, limit=PATIENCE)
ADVERSARIAL = Options(policy="adversarial", seed=1, limit=PATIENCE)
RANDOM = Options(policy="random", seed=3, limit=PATIENCE)

DIVIDING = {"kernel", "cluster", "parts", "batch_invariant"}  # options that divide keys

Results = tuple[torch.Tensor, torch.Tensor]


def run(
    case: Case,
    arch: str,
    schedule: Options = CHECKED,
    function: Callable | None = None,
    **changes: Any,
) -> Results:
    """Return (O, LSE) of the kernel in the emulator. changes: replaced arguments."""
    given, options = case.inputs()
    call = function or (decode if isinstance(case, Dense) else sparse_decode)
    options = options | dict(case.options) | {"arch": arch} | changes
    with watched(schedule):
        return call(*given, return_lse=True, **options)


def check(case: Case, arch: str, *schedules: Options, **changes: Any) -> Results:
    """Return the results, after checking that they are right and have equal bits in every
    schedule.
    """
    first, *others = schedules or (CHECKED,)
    results = run(case, arch, first, **changes)
    place = {"arch": arch} | {name: changes[name] for name in DIVIDING & changes.keys()}
    expect(case.judge(results, senders=senders_of(case, place)))
    for schedule in others:
        other = run(case, arch, schedule, **changes)
        assert same_bits(results, other), f"{schedule.policy} changes bits"
    return results
