"""Bring-up of a GPU: every check and measurement, from small to large, in one file to send back.

    python scripts/bringup.py                      # on a GPU; resumes an earlier run
    python scripts/bringup.py --quick              # one step of each kind: four minutes on an H200
    python scripts/bringup.py --gpus 0 1 2 3       # checks run on other GPUs than measurements
    python scripts/bringup.py --only kernels.fmha-256 speed
    python scripts/bringup.py --bundle             # pack the records, without names and paths
    python scripts/bringup.py --arch sm_100a --emulate     # rehearse it without a GPU, small sizes

Each step is a separate process with a time limit. If it hangs or dies, it is ended, the GPU is
probed, and the next step starts. Steps that only check run several at a time; those that fail run
once more alone. docs/bringup.md explains the file. Exit code 0: every step passed, or had a reason
not to run; 1: a step failed; 2: refused; 3: the GPU does not answer any more; 130: interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path

import _checkout  # noqa: F401 - lab is found
from lab.bringup.planted import KINDS
from lab.bringup.steps import ARCHS
from lab.tools import groups
from lab.tools.command import Command


def add_flags(parser: argparse.ArgumentParser) -> None:
    words = "architecture to bring up; default: that of the GPU here"
    parser.add_argument("--arch", choices=ARCHS, help=words)
    parser.add_argument(
        "--emulate", action="store_true", help="run in the emulator with small sizes"
    )
    parser.add_argument("--quick", action="store_true", help="run one step of each kind (minutes)")
    words = "groups and steps to run, by name; default: all (--list)"
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help=words)
    parser.add_argument("--no-peers", action="store_true", help="do not time other libraries")
    parser.add_argument("--list", action="store_true", help="list the steps; run nothing")
    words = "repeat steps that have a record: failed ones, or all"
    parser.add_argument("--again", choices=("bad", "all"), help=words)
    words = "folder of the records; default: out/bringup/ARCH"
    parser.add_argument("--folder", type=Path, help=words)
    parser.add_argument("--bundle", action="store_true", help="pack the records; run nothing")
    words = "write the README's table of what ran where, from results/; run nothing"
    parser.add_argument("--table", action="store_true", help=words)
    words = f"plant a fault in a step, to rehearse: {', '.join(KINDS)}"
    parser.add_argument("--plant", nargs="+", default=[], metavar="KIND=STEP", help=words)
    words = "checking steps at a time; default: a fourth of the CPUs, at most 4"
    jobs = max(1, min(4, (os.cpu_count() or 1) // 4))
    parser.add_argument("--jobs", type=groups.positive_count, default=jobs, metavar="N", help=words)
    words = "GPUs by the numbers of nvidia-smi: measurements run on the first, checks concurrently "
    words += "on the others; default: one"
    parser.add_argument("--gpus", nargs="+", default=[], metavar="N", help=words)
    words = "time limit of a step in seconds; default: that of the step"
    parser.add_argument("--limit", type=float, metavar="S", help=words)


COMMAND = Command("lab.bringup.perform", add_flags, __doc__)
main = partial(COMMAND.main, "bringup.py")

if __name__ == "__main__":
    sys.exit(main())
