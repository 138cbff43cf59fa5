"""Runs the attention kernel where it can run here and prints how exact it is: `make demo`.

A GPU of compute capability 10.x runs the kernel itself; everywhere else the emulator runs its PTX.
The yardstick is the fp64 definition, and beside each error stands the one that the reference with
the kernel's own rounding points makes. Exit code 1 when a case is out of tolerance or the checker
finds an error, 2 when a case is refused.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ptxemu.host.command_line import add_check_arguments
from workbench.flags.attention import add_case_arguments
from workbench.flags.run import add_backend_arguments, add_result_arguments


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="Without flags of a case the demonstration's four run.",
    )
    add_case_arguments(parser)
    group = parser.add_argument_group("run")
    add_backend_arguments(group, seed="of the policies with chance")
    add_result_arguments(group, limit="every limit")
    group.add_argument(
        "--line-info", action="store_true", help="compile with source lines, for profilers"
    )
    add_check_arguments(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_arguments(argv)
    from workbench.run.fmha import perform

    return perform(options)


if __name__ == "__main__":
    sys.exit(main())
