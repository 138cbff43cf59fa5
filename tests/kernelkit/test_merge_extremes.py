"""Merging parts with any LSE from -inf to 3e38, compared with the definition of attention, in which
a part is a key with its LSE as score and its O as value.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass

import pytest
import torch

from kernelkit.merge.api import merge
from kernelkit.numerics.definition import Numbers, attend
from kernelkit.numerics.tolerance import compare_lse, compare_output
from lab.tools.place import poisoned_outputs
from tests.support.extremes import CALLS, ROUNDS

POSITIONS, HEADS, COLUMNS = 2, 2, 16
LSES = (-math.inf, math.inf, -3e38, -1e9, -200.0, -80.0, 0.0, 1.0, 1.0, 2.5, 80.0, 200.0, 1e9, 3e38)
SINKS = (-math.inf, -3e38, -1e9, 0.0, 80.0, 1e9, 3e38)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Kind:
    """Values that determine the compiled kernel."""

    dtype: str
    sinks: bool
    arch: str


KINDS = [Kind("bf16", True, "sm_100a"), Kind("fp32", False, "sm_89")]


def drawn(kind: Kind, pick: random.Random) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """O [N, 1, S, H, D] with NaN if a part has no keys, LSE [N, 1, H, S] and sinks [H]."""
    generator = torch.Generator().manual_seed(pick.getrandbits(32))
    parts = pick.choice((1, 2, 3, 7))
    few = pick.sample(LSES, pick.choice((1, 2, 4, len(LSES))))
    shape = (parts, 1, HEADS, POSITIONS)
    lse = torch.tensor([pick.choice(few) for _ in range(math.prod(shape))]).reshape(shape)
    o = torch.randn(parts, 1, POSITIONS, HEADS, COLUMNS, generator=generator)
    o[lse.isinf().transpose(2, 3)] = math.nan
    sinks = torch.tensor([pick.choice(SINKS) for _ in range(HEADS)])
    return o.to(DTYPES[kind.dtype]), lse, sinks


def exact(o: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None) -> tuple:
    """(O, LSE) of the merged rows in fp64."""
    merged = o.new_empty(o.shape[1:], dtype=torch.float64)
    total = lse.new_empty(lse.shape[1:], dtype=torch.float64)
    for position, head in itertools.product(range(POSITIONS), range(HEADS)):
        scores, values = lse[:, 0, head, position], o[:, 0, position, head]
        seen = scores.isfinite()
        found = attend(
            torch.ones(1, 1, 1), scores[:, None, None], values[:, None], seen[None],
            Numbers(1.0, sinks=None if sinks is None else sinks[head : head + 1]),
        )  # fmt: skip
        merged[0, position, head], total[0, head, position] = found.o[0, 0], found.lse[0, 0]
    return merged, total


@pytest.mark.parametrize("number", range(ROUNDS))
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.arch}-{kind.dtype}")
def test_extremes(kind, number):
    pick = random.Random(f"{kind}.{number}")
    for _ in range(CALLS):
        o, lse, sinks = drawn(kind, pick)
        sinks = sinks if kind.sinks else None
        with poisoned_outputs():
            results = merge((o, lse), sinks=sinks, backend="emulate", arch=kind.arch)
        right = exact(o, lse, sinks)
        rounded = [tensor.float() for tensor in right]
        reports = (
            compare_output(results[0], right[0], rounded[0].to(o.dtype), torch.bfloat16, (3,)),
            compare_lse(results[1], right[1], rounded[1], dims=()),
        )
        assert all(report.ok for report in reports), (*map(str, reports), lse, sinks)
