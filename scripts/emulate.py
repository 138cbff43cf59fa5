"""One attention case in the emulator with its timeline: a Perfetto trace, a picture, and counts.

Open the JSON at ui.perfetto.dev. Times in it are nominal: they show order and overlap, no speed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ptxemu.host.command_line import add_check_arguments
from ptxemu.options import POLICIES
from workbench.flags.attention import add_case_arguments


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_case_arguments(parser, "1,128,512,1,1")
    parser.add_argument("--policy", choices=POLICIES, default="round-robin", help="of the warps")
    parser.add_argument("--seed", type=int, default=0, help="of the policies with chance")
    parser.add_argument("--cta", type=int, help="CTA of the picture (default: the first)")
    parser.add_argument(
        "--out", type=Path, default=Path("out/timeline"), help="of both files, less .json and .png"
    )
    add_check_arguments(parser)
    arguments = parser.parse_args(argv)
    from workbench.emulate.perform import perform

    return perform(arguments)


if __name__ == "__main__":
    sys.exit(main())
