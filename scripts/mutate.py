"""Mutants of the kernels: each synchronising instruction removed or weakened in turn, and
what tells the mutant from the kernel.

    python scripts/mutate.py --list                        # what would be judged
    python scripts/mutate.py --subject "64 base tmem"      # one kernel
    python scripts/mutate.py --jobs 2                      # all; an interrupted campaign goes on

Every verdict is kept in the JSON file at once. A mutant is killed by a finding of the checker, by
wrong bits, a deadlock or a refusal, under the first schedule that notices.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=" ".join(__doc__.split("\n\n")[0].split()))
    parser.add_argument(
        "--subject", action="append", metavar="TEXT", help="kernels whose name contains it"
    )
    parser.add_argument(
        "--kind", action="append", metavar="TEXT", help="mutation classes whose name contains it"
    )
    parser.add_argument("--list", action="store_true", help="count the mutants and judge none")
    parser.add_argument("--classes", action="store_true", help="print the mutation classes")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes; default: 2")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="so many of each kernel")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument(
        "--schedules",
        type=int,
        metavar="N",
        help="only the first N of them; the first one is checked",
    )
    parser.add_argument(
        "--again",
        choices=("survivors", "all"),
        help="judge again what the file holds, or what survived in it",
    )
    parser.add_argument(
        "--json", type=Path, default=Path("out/mutants.json"), help="default: out/mutants.json"
    )
    return parser.parse_args(argv)


def print_classes() -> None:
    from workbench.mutation.catalogue import CLASSES

    for kind in CLASSES:
        reason = f" Equivalent where {kind.same.reason}." if kind.same.reason else ""
        print(f"{kind.name}: {kind.does} ({kind.section}).{reason}")


def main(argv: Sequence[str] | None = None) -> int:
    options = parsed(argv)
    if options.classes:
        print_classes()
        return 0
    from workbench.mutation.perform import perform

    return perform(options)


if __name__ == "__main__":
    sys.exit(main())
