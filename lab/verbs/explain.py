"""What `explain.py` says of every family: the plans of the problems that the flags spell."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from lab.problems.family import planned
from lab.tools.common import refuse


def lines_of(options: argparse.Namespace) -> Iterator[str]:
    """The plan of each problem, line by line."""
    problems, arch = planned(options)
    for number, problem in enumerate(problems):
        first, *rest = problem.plan(arch)
        yield problem.gap * (number > 0) + first
        yield from rest


def perform(options: argparse.Namespace) -> int:
    try:
        print("\n".join(lines_of(options)))
    except (ValueError, NotImplementedError) as refusal:
        return refuse(refusal)
    return 0
