"""What `explain.py fmha` says: which blocks a CTA computes, roles, edges, and the maps of both
memories."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from fmha.arguments import Arguments
from fmha.choose import choose_config, longest_queries, problem_of
from fmha.plan import AttentionPlan, make_plan
from fmha.sections import heads_of_section
from kernelkit.plan import hw
from lab.cases.attention import arguments_of, case_of
from lab.tools.common import describe
from lab.verbs.explain.plans import Section, lines_of, parts_of, plural, print_plan

# Those of `kernelkit.plan.hw.SMS_OF`.
GPUS = {
    "sm_80": "an A100", "sm_86": "an RTX 3090", "sm_87": "an Orin", "sm_89": "an RTX 4090",
    "sm_90a": "an H100", "sm_100a": "a B200", "sm_103a": "a B300", "sm_120a": "an RTX 5090",
    "sm_121a": "a DGX Spark",
}  # fmt: skip


def explain(arguments: Arguments, arch: str = "sm_100a") -> Iterator[str]:
    """The whole plan of a call, line by line."""
    plan = make_plan(choose_config(arguments, arch), arch)
    yield f"fmha forward: {describe(plan.config)}"
    yield from lines_of((query_blocks(arguments, plan, arch), *parts_of(plan)))


def query_blocks(arguments: Arguments, plan: AttentionPlan, arch: str) -> Section:
    """What a CTA or a pair computes at a time, and in which order all of them take turns."""
    layout, config = plan.layout, plan.config
    heads = arguments.batch * arguments.q_heads // config.group
    of_head = layout.blocks(longest_queries(arguments))
    whose = "KV head" if config.group > 1 else "head"
    at_once = hw.SMS_OF[arch] * layout.residents // layout.ctas
    return "Query blocks", [
        ("a block", f"{plural(layout.block_tiles // layout.halves, 'tile')} of {_rows(plan)}"),
        ("all blocks", f"{of_head} of each {whose} x {plural(heads, whose)} of all entries"),
        ("launched", _launched(of_head * heads, layout.ctas, at_once, arch)),
        ("order", _order(heads, heads_of_section(problem_of(arguments), config, arch, at_once))),
        ("key tiles", f"{layout.tile_n} keys, from the first one that a row of the block sees"),
    ]


def _rows(plan: AttentionPlan) -> str:
    layout = plan.layout
    if plan.config.group == 1:
        return f"{layout.rows * layout.halves} queries"
    tokens, heads = plural(layout.box_tokens, "token"), plural(layout.box_heads, "head")
    return f"{tokens} x {heads} that share them"


def _launched(blocks: int, ctas: int, at_once: int, arch: str) -> str:
    """On a GPU all of whose SMs are free."""
    places = min(at_once, blocks)
    least, more = divmod(blocks, max(places, 1))
    who = plural(places, "CTA") if ctas == 1 else f"{plural(places, 'pair')} of CTAs"
    each = f"{least} or {plural(least + 1, 'block')}" if more else plural(least, "block")
    return f"{who} of {at_once} that {GPUS[arch]} runs at once; {each} each"


def _order(heads: int, section: tuple[int, int]) -> str:
    size, near = section
    if near < size or near == 1:
        return "head after head, whose K and V are then in L2"
    if size < heads:
        return f"the longest of {size} heads first, then of the next {size}: L2 holds their keys"
    return f"the longest of all {size} heads first"


def perform(options: argparse.Namespace) -> int:
    return print_plan(lambda: explain(arguments_of(case_of(options), "meta"), options.arch))
