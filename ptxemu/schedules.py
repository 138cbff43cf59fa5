"""Schedules of a run: policies and seeds as commands and tests name them."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from ptxemu.options import POLICIES


class Schedule(NamedTuple):
    """A policy with its seed; as text 'adversarial-1'."""

    policy: str = POLICIES[0]
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.policy}-{self.seed}"


def schedules(policies: Sequence[str], seeds: Sequence[int]) -> list[Schedule]:
    """Return each policy with each seed, in order; 'round-robin' only with the first seed."""
    pairs = itertools.product(policies, seeds)
    return [Schedule(*pair) for pair in pairs if pair[0] != POLICIES[0] or pair[1] == seeds[0]]


def schedule(text: str) -> Schedule:
    """Argument type: 'adversarial' or 'adversarial-1'."""
    policy, dash, seed = text.rpartition("-")
    if dash and seed.isdigit():
        return Schedule(policies(policy)[0], int(seed))
    return Schedule(policies(text)[0])


def policies(text: str) -> list[str]:
    """Argument type: 'round-robin,adversarial'."""
    names = text.split(",")
    unknown = [name for name in names if name not in POLICIES]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"{', '.join(unknown)}: must be some of {', '.join(POLICIES)}"
        )
    return names


def seeds(text: str) -> list[int]:
    """Argument type: '0,1,2'."""
    return [int(seed) for seed in text.split(",")]


def add_schedule_arguments(parser: argparse.ArgumentParser) -> None:
    """--policy and --seeds of a command that runs once for each schedule."""
    parser.add_argument(
        "--policy",
        type=policies,
        default=[POLICIES[0]],
        metavar="NAME,...",
        help=f"policies: {', '.join(POLICIES)}",
    )
    parser.add_argument(
        "--seeds", type=seeds, default=[0], metavar="N,...", help="seeds of the random policies"
    )
