"""How many warp-instructions per second ptxemu executes on the attention kernel.

The first launch of a module also generates its code, so it stands apart from the best of the rest.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ptxemu.options import POLICIES
from workbench.flags.attention import add_case_arguments


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_case_arguments(parser, "1,512,512,1,1")
    parser.add_argument("--policy", choices=POLICIES, default="round-robin", help="of the warps")
    parser.add_argument("--repeat", type=int, default=3, help="launches after the first")
    parser.add_argument("--check", action="store_true", help="the same under the checker")
    arguments = parser.parse_args(argv)
    from workbench.bench.emulator import perform

    return perform(arguments)


if __name__ == "__main__":
    sys.exit(main())
