"""How many warp-instructions per second ptxemu executes on the attention kernel.

The first launch of a module also generates its code, so it stands apart from the best of the rest.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys

from _cases import Case, attend, check
from _common import refuse
from _flags import add_case_arguments, case_of
from ptxemu.options import POLICIES, Options
from ptxemu.report import LaunchReport


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_case_arguments(parser, "1,512,512,1,1")
    parser.add_argument("--policy", choices=POLICIES, default="round-robin", help="of the warps")
    parser.add_argument("--repeat", type=int, default=3, help="launches after the first")
    parser.add_argument("--check", action="store_true", help="the same under the checker")
    arguments = parser.parse_args()
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


if __name__ == "__main__":
    sys.exit(main())
