"""Attention, decode and merge at the limits of their arguments: helpers of the packages' tests.

A kind is a kernel. A round is CALLS problems of it, in which each KV head of each entry has
separate contents and numbers. `scripts/soak.py fmha` and `gqa` draw the same problems on a GPU.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kernelkit.numerics.tolerance import Report
from lab.problems import extremes

ROUNDS = 68  # of a kind; tiers.md says which of them run when
CALLS = 4  # of a round
BATCH, KV_HEADS, GROUP = 2, 2, 2
LENGTHS = (0, 1, 17, 40, 70, 130, 150, 200)

Kinds = dict[str, tuple[str, dict[str, Any]]]  # name -> (architecture, fields of a Case)


def each_round(kinds: Kinds) -> pytest.MarkDecorator:
    """Parameters `kind` and `number` of a round."""
    pairs = [(kind, number) for kind in kinds for number in range(ROUNDS)]
    ids = [f"{kind}-{number}" for kind, number in pairs]
    return pytest.mark.parametrize(("kind", "number"), pairs, ids=ids)


def wrong(
    judged: Callable[[Any], Sequence[Report]], drawn: Callable[[random.Random], Any], seed: str
) -> list[str]:
    """Return the reports that are out of tolerance in a round.

    judged: runs a case and returns its reports.
    drawn: draws a case, without extremes.
    """
    pick, found = random.Random(seed), []
    for _ in range(CALLS):
        case = extremes.of_case(drawn(pick), pick)
        bad = [str(report) for report in judged(case) if not report.ok]
        if bad:
            found.append("\n".join([repr(case), *bad]))
    return found


def lengths(pick: random.Random) -> list[int]:
    """Random numbers of keys of each entry."""
    return [pick.choice(LENGTHS) for _ in range(BATCH)]
