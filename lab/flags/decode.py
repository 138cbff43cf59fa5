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
    add(group, "kv-dtype", "dtype of k and v only", "", shown="as --dtype", choices=KV_DTYPES)
    switch(group, "scales", "use scales for e4m3 k and v, one per KV head")
    add(group, "page-size", "rows per page of keys; 0: no pages", 0, type=count)
    group = parser.add_argument_group("what a token sees")
    groups.add_visibility(group, causal=True)
    group.add_argument("--full", dest="causal", action="store_false", help=argparse.SUPPRESS)
    groups.add_scores(parser.add_argument_group("scores"))
    group = parser.add_argument_group("kernel")
    for name in TUNABLE:
        add(group, name.replace("_", "-"), f"`{name}` of the config", shown="by sizes")
    add(group, "parts", "clusters per KV head; 0: by sizes", 0)
    switch(group, "batch-invariant", "make an entry's bits independent of the rest of the batch")
    switch(group, "pdl", "use programmatic dependent launch")
    switch(group, "kv-ready-before-pdl", "with --pdl: only q waits for the previous kernel")


def add_static(parser: argparse.ArgumentParser) -> None:
    """Flags of `explain.py gqa`."""
    add_case(parser)
    add(parser, "arch", "architecture of the kernel", groups.ARCHS[0], choices=groups.ALL_ARCHS)


def add_dump(parser: argparse.ArgumentParser) -> None:
    """Flags of `dump.py gqa`."""
    add_static(parser)
    words = "print a table over arch, head_dim, number of columns, with bf16 and e4m3 keys"
    switch(parser, "grid", words)


def add_run(parser: argparse.ArgumentParser) -> None:
    """Flags of `run.py gqa`."""
    add_case(parser)
    groups.add_tolerance(groups.add_run(parser, groups.ALL_ARCHS))
