"""The flags of `bench.py units`."""

from __future__ import annotations

import argparse

from lab.tools import groups
from lab.tools.groups import add

ARCHS = ("sm_90a", "sm_100a", "sm_103a")
GROUPS = (
    *("issue", "latency", "tensor", "branch", "mbarrier", "barrier", "dsmem", "load", "tma"),
    *("bandwidth", "atomic", "launch", "clock", "tcgen05", "tmem"),
)


def add_units(parser: argparse.ArgumentParser) -> None:
    some = {"nargs": "+", "choices": GROUPS, "metavar": "GROUP", "shown": "all"}
    add(parser, "groups", f"groups of benchmarks: {', '.join(GROUPS)}", GROUPS, **some)
    add(parser, "repeat", "launches of each kernel, after two for warm-up", 9)
    words = "run the kernels for this architecture in the emulator with its checker instead"
    add(parser, "emulate", words, "", choices=ARCHS, shown="measure on the GPU")
    how = {"type": groups.positive_count, "metavar": "N"}
    add(parser, "every", "with --emulate: run only every Nth kernel", 1, **how)
    groups.add_json(parser)
    groups.add_file(parser, "show", "print the tables of an earlier run's file; measure nothing")
