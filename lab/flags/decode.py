"""The flags that spell a decode case; `lab.problems.gqa.case_of` makes it."""

from __future__ import annotations

import argparse

from gqa_lowlatency.config import HEAD_DIMS, IO_DTYPES, KV_DTYPES, OUT_DTYPES, TUNABLE
from lab.tools import groups
from lab.tools.groups import add, count, positive_count, switch

SIZES = {"batch": 1, "q_len": 1, "kv_len": 1024, "q_heads": 16, "kv_heads": 2}


def add_case(parser: argparse.ArgumentParser) -> None:
    """All flags of a case, without --arch."""
    group = parser.add_argument_group("problem")
    groups.add_sizes(group, **SIZES)
    add(group, "head-dim", f"one of {HEAD_DIMS}", 128, old=["D", "dH"], type=positive_count)
    groups.add_dtypes(group, IO_DTYPES, OUT_DTYPES, "q, k and v")
    add(group, "kv-dtype", "of k and v alone", "", shown="as --dtype", choices=KV_DTYPES)
    switch(group, "scales", "of e4m3 k and v, one per KV head")
    add(group, "page-size", "keys in pages of so many rows; 0: no pages", 0, type=count)
    group = parser.add_argument_group("what a token sees")
    groups.add_visibility(group, causal=True)
    group.add_argument("--full", dest="causal", action="store_false", help=argparse.SUPPRESS)
    groups.add_scores(parser.add_argument_group("scores"))
    group = parser.add_argument_group("kernel")
    for name in TUNABLE:
        add(group, name.replace("_", "-"), "of the config", shown="by sizes")
    add(group, "parts", "clusters of a KV head; 0: by sizes", 0)
    switch(group, "batch-invariant", "an entry's bits do not depend on the batch around it")
    switch(group, "pdl", "programmatic dependent launch")
    switch(group, "kv-ready-before-pdl", "with --pdl: only q waits for the kernel in front")


def add_static(parser: argparse.ArgumentParser) -> None:
    """Flags of `explain.py gqa`."""
    add_case(parser)
    add(parser, "arch", "whose kernel", groups.ARCHS[0], choices=groups.ALL_ARCHS)


def add_dump(parser: argparse.ArgumentParser) -> None:
    """Flags of `dump.py gqa`."""
    add_static(parser)
    words = "a table instead: every arch, head_dim, number of columns, with bf16 and e4m3 keys"
    switch(parser, "grid", words)


def add_run(parser: argparse.ArgumentParser) -> None:
    """Flags of `run.py gqa`."""
    add_case(parser)
    groups.add_tolerance(groups.add_run(parser, groups.ALL_ARCHS))
