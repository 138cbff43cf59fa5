"""The flags of attention to latent keys; `lab.problems.mla` makes its cases."""

from __future__ import annotations

import argparse

from lab.tools import groups
from lab.tools.groups import add, count, positive_count, switch
from mla.attention.config import KERNEL_NAMES, MAX_HEADS
from mla.attention.formats import FORMS

# of lab.bench.mla_peers, which imports torch
ROWS = ("dense", "v4", "v3.2", "v4.1", "prefill")
PEERS = ("mla", "mla pdl", "mla warp", "mla wgmma", "flashmla")
OPERATIONS = ("decode", "sparse_decode", "sparse_prefill")
RECORDS = tuple(name for name in FORMS if name != "e4m3_576")
NO_RECORD = "none"


def add_case(parser: argparse.ArgumentParser) -> None:
    """All flags of a case, without --arch."""
    group = parser.add_argument_group("problem")
    add(group, "operation", "function of `mla`", OPERATIONS[0], choices=OPERATIONS)
    add(group, "heads", f"query heads, up to {MAX_HEADS}", 16, type=positive_count)
    add(group, "tokens", "query tokens: of an entry of decode, else in all", 1, type=positive_count)
    group = parser.add_argument_group("decode")
    some = {"type": groups.count, "nargs": "+"}
    add(group, "kv-len", "keys of each entry, also as 8k", (128,), shown="128", **some)
    add(group, "page-size", "rows per page of keys", 64, type=positive_count)
    switch(group, "e4m3", "keys are e4m3 with one scale")
    switch(group, "full", "a token sees all keys of its entry, those of later tokens too")
    group = parser.add_argument_group("sparse_decode and sparse_prefill")
    add(group, "record", f"format of entries: {', '.join(RECORDS)}", "fp8_584", choices=RECORDS)
    add(group, "chosen", "entries that a token lists", 64, type=positive_count)
    words = "format of a second cache"
    add(group, "extra", words, NO_RECORD, choices=(NO_RECORD, *RECORDS))
    add(group, "extra-chosen", "entries that a token lists of it", 32, type=positive_count)
    switch(group, "rope", "rotate the last 64 columns of O back")
    group = parser.add_argument_group("kernel")
    switch(group, "sinks", "give each head a sink logit")
    add(group, "kernel", "kernel", KERNEL_NAMES[0], choices=KERNEL_NAMES)
    add(group, "cluster", "CTAs of a cluster; 0: by sizes", 0, type=count)
    add(group, "parts", "clusters that share an entry; 0: by sizes", 0, type=count)
    switch(group, "batch-invariant", "make an entry's bits independent of the rest of the batch")
    switch(group, "pdl", "use programmatic dependent launch")


def add_static(parser: argparse.ArgumentParser) -> None:
    """Flags of `explain.py mla` and `dump.py mla`."""
    add_case(parser)
    add(parser, "arch", "architecture of the kernel", groups.ARCHS[0], choices=groups.ALL_ARCHS)


def add_run(parser: argparse.ArgumentParser) -> None:
    """Flags of `run.py mla`."""
    add_case(parser)
    group = groups.add_run(parser, groups.ALL_ARCHS)
    groups.add_tolerance(group)
    switch(group, "unjudged", "skip the comparison, for profilers: a large reference takes long")


def add_bench(parser: argparse.ArgumentParser) -> None:
    """Flags of `bench.py mla`."""
    group = parser.add_argument_group("problems")
    some = {"nargs": "+", "choices": ROWS, "metavar": "SET", "shown": "all"}
    add(group, "rows", f"sets of problems: {', '.join(ROWS)}", ROWS, **some)
    some = {"nargs": "+", "type": positive_count, "shown": "all"}
    add(group, "heads", "only problems with so many query heads", (), **some)
    add(group, "entries", "only problems with so many query entries", (), **some)
    group = parser.add_argument_group("peers")
    some = {"nargs": "+", "choices": PEERS, "metavar": "NAME", "shown": "mla and flashmla"}
    words = f"peers: {', '.join(PEERS)}"
    add(group, "peers", words, ("mla", "flashmla"), **some)
    group = parser.add_argument_group("output")
    groups.add_file(group, "show", "print the tables of an earlier run's file; measure nothing")
    switch(group, "markdown", "with --show: one table in Markdown")
    groups.add_file(
        group, "json", "write every figure: one line per row, or an array if it ends in .json"
    )
