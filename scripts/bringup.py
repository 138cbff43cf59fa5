"""Everything that there is to find out on a GPU, from small to large, as one file to send back.

    python scripts/bringup.py                      # on a GPU; goes on where an earlier run ended
    python scripts/bringup.py --quick              # the first of each kind: four minutes on an H200
    python scripts/bringup.py --gpus 0 1 2 3       # with what checks beside what measures
    python scripts/bringup.py --only kernels.fmha-256 speed
    python scripts/bringup.py --bundle             # pack what there is, without names and paths
    python scripts/bringup.py --arch sm_100a --emulate     # rehearse it without a GPU, small sizes

Each step is a process of its own with a limit of time. One that hangs or dies costs itself alone:
it is ended, the GPU is looked at, and the next step goes on. Steps that only check run several at a
time, and what does not pass once more alone. docs/bringup.md says how to read the file. Exit code
0: every step passed, or refused or could not run for a reason; 1: one did not; 2: refused; 3: the
GPU does not answer any more; 130: interrupted.
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
    words = "what is brought up; default: what the GPU here has"
    parser.add_argument("--arch", choices=ARCHS, help=words)
    parser.add_argument("--emulate", action="store_true", help="in the emulator, small sizes")
    parser.add_argument("--quick", action="store_true", help="minutes: the first of each kind")
    words = "groups and steps by name; default: all (--list)"
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help=words)
    parser.add_argument("--no-peers", action="store_true", help="no times of other libraries")
    parser.add_argument("--list", action="store_true", help="the steps; nothing is run")
    words = "run again what has a record: what did not pass, or everything"
    parser.add_argument("--again", choices=("bad", "all"), help=words)
    words = "folder of the records; default: out/bringup/ARCH"
    parser.add_argument("--folder", type=Path, help=words)
    parser.add_argument("--bundle", action="store_true", help="pack what there is; nothing is run")
    words = "write the README's table of what ran where, by results/; nothing is run"
    parser.add_argument("--table", action="store_true", help=words)
    words = f"a fault on purpose in a step, to rehearse: {', '.join(KINDS)}"
    parser.add_argument("--plant", nargs="+", default=[], metavar="KIND=STEP", help=words)
    words = "steps at a time, of those that only check; default: a fourth of the CPUs, at most 4"
    jobs = max(1, min(4, (os.cpu_count() or 1) // 4))
    parser.add_argument("--jobs", type=groups.positive_count, default=jobs, metavar="N", help=words)
    words = "by the numbers of nvidia-smi: what measures has the first, what checks runs beside it "
    words += "on the others; default: one"
    parser.add_argument("--gpus", nargs="+", default=[], metavar="N", help=words)
    words = "seconds of a step at most; default: each has its own"
    parser.add_argument("--limit", type=float, metavar="S", help=words)


COMMAND = Command("lab.bringup.perform", add_flags, __doc__)
main = partial(COMMAND.main, "bringup.py")

if __name__ == "__main__":
    sys.exit(main())
