"""Damaged files of every kind that this repository reads: each must be read or raise a named error.

    python scripts/fuzz.py gguf ptx --count 200 --seed 1

Exit code 1: a file raised another error, took too long, or needed too much memory.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial

import _checkout  # noqa: F401 - lab is found
from lab.tools import groups
from lab.tools.command import Command


def add_flags(parser: argparse.ArgumentParser) -> None:
    words = "these alone; a wrong name lists all"
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=words)
    groups.add(parser, "count", "files of each kind", 20_000, type=groups.count)
    groups.add(parser, "seed", "of the first file", 0, type=groups.count)
    groups.add_json(parser, "the counts")


COMMAND = Command("lab.fuzz.perform", add_flags, __doc__)
main = partial(COMMAND.main, "fuzz.py")

if __name__ == "__main__":
    sys.exit(main())
