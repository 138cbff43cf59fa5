"""Mutants of the kernels: remove or weaken each synchronising instruction, and see what notices.

    python scripts/mutate.py --list                        # count the mutants
    python scripts/mutate.py --subject "64 base"           # one kernel
    python scripts/mutate.py --jobs 2                      # all; resumes an interrupted campaign

Every verdict is written to the JSON file at once. A mutant is killed by a finding of the checker,
wrong bits, a deadlock or a refusal, with the first schedule that notices.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import _checkout  # noqa: F401 - lab is found
from lab.tools.command import Command
from ptxemu.host.command_line import output_file


def add_flags(parser: argparse.ArgumentParser) -> None:
    some = {"action": "append", "metavar": "TEXT"}
    parser.add_argument(
        "--subject", help="kernels whose name contains this text; repeatable", **some
    )
    words = "mutation classes whose name contains this text; repeatable"
    parser.add_argument("--kind", help=words, **some)
    parser.add_argument("--list", action="store_true", help="count the mutants; judge none")
    parser.add_argument("--classes", action="store_true", help="print the mutation classes")
    counted = {"type": int, "metavar": "N"}
    parser.add_argument("--jobs", default=2, help="processes; default: 2", **counted)
    parser.add_argument("--sample", default=0, help="mutants per kernel; 0: all", **counted)
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample; default: 0")
    words = "only the first N schedules; the checker runs with the first; default: all"
    parser.add_argument("--schedules", help=words, **counted)
    words = "judge mutants of the file again: all, or the survivors"
    parser.add_argument("--again", choices=("survivors", "all"), help=words)
    words = "file of the verdicts; default: out/mutants.json"
    parser.add_argument("--json", type=output_file, default=Path("out/mutants.json"), help=words)


COMMAND = Command("lab.mutation.campaign", add_flags, __doc__)
main = partial(COMMAND.main, "mutate.py")

if __name__ == "__main__":
    sys.exit(main())
