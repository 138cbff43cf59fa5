"""The flags of `bench.py units`."""

from __future__ import annotations

import argparse

from workbench.flags import groups
from workbench.flags.groups import add

GROUPS = (
    *("issue", "latency", "tensor", "branch", "mbarrier", "barrier", "dsmem", "load", "tma"),
    *("bandwidth", "atomic", "launch", "clock"),
)


def add_units(parser: argparse.ArgumentParser) -> None:
    some = {"nargs": "+", "choices": GROUPS, "metavar": "GROUP", "shown": "all"}
    add(parser, "groups", f"of {', '.join(GROUPS)}", GROUPS, **some)
    add(parser, "repeat", "launches of each kernel, behind two that warm up", 9)
    groups.add_json(parser)
    groups.add_file(parser, "show", "tables of an earlier run's file, nothing is measured")
