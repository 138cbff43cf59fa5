"""Runs a MoE layer, from router logits to the combined output, and prints how exact it is.

A GPU of compute capability 10.x runs the kernels themselves; everywhere else the emulator does. The
yardstick is the fp64 definition with the weights as they were before they were packed. Beside the
error stands that of plain torch which quantises where the kernels do: what the format costs. Exit
code 1 when the kernels add to it or the checker finds an error, 2 when a layer is refused.

    python scripts/run_moe.py --tokens 9 --hidden 256 --intermediate 128 --experts 6 --top-k 2
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ptxemu.host.command_line import add_check_arguments
from workbench.flags.moe import add_layer_arguments
from workbench.flags.run import add_backend_arguments, add_result_arguments


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog=__doc__.rstrip().splitlines()[-1].strip()
    )
    add_layer_arguments(parser)
    group = parser.add_argument_group("run")
    add_backend_arguments(group, seed="of the policies with chance")
    add_result_arguments(group, limit="the limit")
    add_check_arguments(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_arguments(argv)
    from workbench.run.moe import perform

    return perform(options)


if __name__ == "__main__":
    sys.exit(main())
