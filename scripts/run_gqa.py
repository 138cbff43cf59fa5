"""Runs the decode attention kernel and prints how exact it is, and on a GPU how long it takes.

A GPU of compute capability 9.0 or 10.x runs the kernel itself; everywhere else the emulator runs
the PTX of --arch. The yardstick is the fp64 definition, and beside each error stands the one that
the reference with the kernel's own rounding points makes. Exit code 1 when a case is out of
tolerance or the checker finds an error, 2 when a case is refused.

    python scripts/run_gqa.py --kvL 8192 --kvH 8 --qH 64 --BS 1 --arch sm_90a
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ptxemu.host.command_line import add_check_arguments
from workbench.flags.decode import add_case_arguments
from workbench.flags.run import add_backend_arguments, add_result_arguments


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog=__doc__.rstrip().splitlines()[-1].strip()
    )
    add_case_arguments(parser, help="what the emulator runs")
    _add_run_arguments(parser.add_argument_group("run"))
    add_check_arguments(parser)
    return parser.parse_args(argv)


def _add_run_arguments(group: argparse._ArgumentGroup) -> None:
    add_backend_arguments(group, seed="of the policies with chance")
    add_result_arguments(group, limit="every limit")


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_arguments(argv)
    from workbench.run.gqa import perform

    return perform(options)


if __name__ == "__main__":
    sys.exit(main())
