"""What `explain.py fmha` says: roles, edges, and the maps of both memories."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from fmha.plan import AttentionPlan
from workbench.cases.attention import case_of, plan_of
from workbench.common import describe
from workbench.explain.plans import lines_of, parts_of, print_plan


def explain(plan: AttentionPlan) -> Iterator[str]:
    """The whole plan, line by line."""
    pair = ", by a pair of CTAs that share each tile" if plan.config.ctas == 2 else ""
    yield f"fmha forward: {describe(plan.config)}{pair}"
    yield from lines_of(parts_of(plan))


def perform(options: argparse.Namespace) -> int:
    return print_plan(lambda: explain(plan_of(case_of(options))))
