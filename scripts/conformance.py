"""Run every form that ptxemu supports on this GPU and in ptxemu, with the same inputs.

python scripts/conformance.py                           the table
python scripts/conformance.py --accumulation aligned --json results/conformance_h100.json
python scripts/conformance.py --resume session.jsonl --seconds 300   a part; repeat for the rest
python scripts/conformance.py --accumulation aligned    also compare products bit for bit
python scripts/conformance.py --questions               answer open questions of the manual
python scripts/conformance.py --recorded results/conformance_h100.json   without a GPU: compare
                                                        ptxemu with recorded results
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path

import _checkout  # noqa: F401 - lab is found
from lab.tools import groups
from lab.tools.command import Command


def add_flags(parser: argparse.ArgumentParser) -> None:
    groups.add_json(parser, "the results")
    words = "recorded results of a GPU to compare ptxemu with; needs no GPU here"
    parser.add_argument("--recorded", type=Path, metavar="FILE", help=words)
    words = "programs whose name contains one of these words; default: all"
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help=words)
    words = "ask the GPU how tensor cores sum, and in which order writes become visible"
    parser.add_argument("--questions", action="store_true", help=words)
    words = "how ptxemu sums products: fast, or aligned as the tensor core does; default: fast"
    parser.add_argument("--accumulation", choices=("fast", "aligned"), default="fast", help=words)
    words = "file that keeps the results so far, to resume from"
    parser.add_argument("--resume", type=Path, metavar="FILE", help=words)
    words = "stop after this time; default: 0, when everything is done"
    parser.add_argument("--seconds", type=float, default=0, metavar="S", help=words)
    words = "write the GPU's results where they differ, for numpy (.npz)"
    parser.add_argument("--outputs", type=Path, metavar="FILE", help=words)
    words = "processes that use the GPU, and compile for it; default: 4"
    parser.add_argument("--contexts", type=int, default=4, metavar="N", help=words)
    words = "processes that emulate; default: as many as there are cores"
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N", help=words)


COMMAND = Command("lab.silicon.conformance.perform", add_flags, __doc__)
main = partial(COMMAND.main, "conformance.py")

if __name__ == "__main__":
    sys.exit(main())
