"""What bench_emulator.py does: warp-instructions per second of ptxemu."""

from __future__ import annotations

import argparse
import os
import platform

from ptxemu.options import Options
from ptxemu.report import LaunchReport
from workbench.cases.attention import Case, attend, case_of, check
from workbench.common import refuse


def rate(launch: LaunchReport) -> str:
    speed = launch.warp_instructions / launch.seconds
    return f"{speed:>11,.0f} warp-instructions/s  ({launch.seconds:.2f} s)"


def _measure(case: Case, options: Options, repeat: int) -> LaunchReport:
    """Print the rates of the first launch and of the best of the others; return that one."""
    launches = [launch for _ in range(1 + repeat) for launch in attend(case, "emulate", options)[1]]
    what = "checked" if options.check else "unchecked"
    print(f"{what}, {launches[0].warp_instructions:,} warp-instructions")
    print(f"  first launch  {rate(launches[0])}")
    best = min(launches[1:] or launches, key=lambda launch: launch.seconds)
    if repeat:
        print(f"  best of {repeat:<5} {rate(best)}")
    return best


def perform(arguments: argparse.Namespace) -> int:
    """What the flags ask for; returns the exit code."""
    case = case_of(arguments)
    try:
        check(case)
    except (ValueError, NotImplementedError) as refusal:
        return refuse(refusal)
    print(f"{case}, {arguments.policy}; Python {platform.python_version()}, {os.cpu_count()} cores")
    plain = _measure(case, Options(policy=arguments.policy, limit=None), arguments.repeat)
    if arguments.check and arguments.repeat:
        options = Options(policy=arguments.policy, limit=None, check=True)
        checked = _measure(case, options, arguments.repeat)
        print(f"a checked launch takes {checked.seconds / plain.seconds:.2f} times as long")
    return 0
