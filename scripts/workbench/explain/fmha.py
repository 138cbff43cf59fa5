"""What explain.py says of an attention case: roles, edges, and the maps of both memories."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from fmha.plan import AttentionPlan
from workbench.cases.attention import case_of, plan_of
from workbench.common import describe, refuse
from workbench.explain.plans import edges, lines_of, roles, shared_memory, tensor_memory


def explain(plan: AttentionPlan) -> Iterator[str]:
    """The whole plan, line by line."""
    pair = ", by a pair of CTAs that share each tile" if plan.config.ctas == 2 else ""
    yield f"fmha forward: {describe(plan.config)}{pair}"
    yield from lines_of(
        (
            roles(plan.roles),
            edges(plan.edges),
            shared_memory(plan.smem),
            tensor_memory(plan.tmem),
        )
    )


def perform(options: argparse.Namespace) -> int:
    """What the flags ask for; returns the exit code."""
    try:
        plan = plan_of(case_of(options))
    except (ValueError, NotImplementedError) as refusal:
        return refuse(refusal)
    print("\n".join(explain(plan)))
    return 0
