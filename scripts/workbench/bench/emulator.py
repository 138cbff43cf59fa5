"""What `bench.py emulator` does: warp-instructions per second of ptxemu."""

from __future__ import annotations

import argparse
import os
import platform

from ptxemu.report import LaunchReport
from workbench.cases.attention import attend, case_of, check
from workbench.common import refuse
from workbench.place import Place
from workbench.problems.attention import Case

EMULATED = Place("emulate", "sm_100a", "as asked")


def rate(launch: LaunchReport) -> str:
    speed = launch.warp_instructions / launch.seconds
    return f"{speed:>11,.0f} warp-instructions/s  ({launch.seconds:.2f} s)"


def _measure(case: Case, options: argparse.Namespace, *, checked: bool) -> LaunchReport:
    """Print the rates of the first launch and of the best of the others; return that one."""
    repeat, launches = options.repeat, []
    for _ in range(1 + repeat):
        launches += attend(case, EMULATED, options, check=checked)[1]
    what = "checked" if checked else "unchecked"
    print(f"{what}, {launches[0].warp_instructions:,} warp-instructions")
    print(f"  first launch  {rate(launches[0])}")
    best = min(launches[1:] or launches, key=lambda launch: launch.seconds)
    if repeat:
        print(f"  best of {repeat:<5} {rate(best)}")
    return best


def perform(options: argparse.Namespace) -> int:
    try:
        case = case_of(options)
        check(case)
    except (ValueError, NotImplementedError) as refusal:
        return refuse(refusal)
    print(f"{case}, {options.policy}; Python {platform.python_version()}, {os.cpu_count()} cores")
    plain = _measure(case, options, checked=False)
    if options.check and options.repeat:
        checked = _measure(case, options, checked=True)
        print(f"a checked launch takes {checked.seconds / plain.seconds:.2f} times as long")
    return 0
