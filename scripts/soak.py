"""The long run of kvcache's manager: random operations beside the naive model of its tests.

    python scripts/soak.py                                 # 1,000,000 operations
    python scripts/soak.py --operations 50k --layout sparse --seed 7
    python scripts/soak.py --replay out/soak_failure.json  # what failed, once more

Every operation is followed by check(), a replay of the events and a comparison of all bytes that
the requests it touched still need; every --every of them by one of everything. Pools and policy
are those of the tests for one seed in four, and random for the others. A failure stops the run; its
operations are made as few as still fail, and stored. Exit code 0: nothing failed; 1: something did.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from workbench.command import Command
from workbench.flags import groups


def number(text: str) -> int:
    """Argument type: '50k' is 50,000, '2m' two million."""
    unit = {"k": 1_000, "m": 1_000_000}.get(text[-1:].lower(), 1)
    return int(text[:-1] if unit > 1 else text) * unit


def add_flags(parser: argparse.ArgumentParser) -> None:
    words = "how many; 50k is 50,000 and 2m two million; default: 1m"
    given = {"type": number, "default": 1_000_000, "metavar": "N"}
    parser.add_argument("--operations", help=words, **given)
    parser.add_argument("--seed", type=int, default=0, help="of the first cache; default: 0")
    words = "cases whose name contains it, repeatable; default: all"
    parser.add_argument("--layout", action="append", metavar="TEXT", help=words)
    counted = {"type": int, "metavar": "N"}
    words = "compare everything behind so many operations; default: 8"
    parser.add_argument("--every", default=8, help=words, **counted)
    words = "processes; default: 2"
    parser.add_argument("--jobs", type=groups.number, default=2, metavar="N", help=words)
    groups.add_json(parser, "the figures")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="run a stored failure again")


COMMAND = Command("workbench.soak.perform", add_flags, __doc__)
main = partial(COMMAND.main, "soak.py")

if __name__ == "__main__":
    sys.exit(main())
