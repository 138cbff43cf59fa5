"""The plan of an attention case as text: roles, edges, and the maps of shared and tensor memory.

The flags are those of run_fmha.py. Nothing is compiled: the plan is data. The figures of
fmha/README.md are copies of this output.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from _cases import plan_of
from _common import describe, refuse
from _flags import PLAIN_SHAPE, add_case_arguments, case_of
from _plans import edges, lines_of, roles, shared_memory, tensor_memory
from fmha.plan import AttentionPlan


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_case_arguments(parser, PLAIN_SHAPE)
    try:
        plan = plan_of(case_of(parser.parse_args()))
    except (ValueError, NotImplementedError) as refusal:
        return refuse(refusal)
    print("\n".join(explain(plan)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
