"""What the compiler made of an attention config: PTX, and registers, spills and SASS where it can.

Registers and SASS need NVIDIA's cuobjdump and nvdisasm, which `pip install '.[sass]'` brings.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from workbench.flags.attention import PLAIN_SHAPE, add_case_arguments


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default="sm_100a", help="default: sm_100a")
    parser.add_argument("--out", type=Path, default=Path("out/dump"), help="default: out/dump")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    add_case_arguments(parser, PLAIN_SHAPE)
    options = parser.parse_args(argv)
    from workbench.dump.fmha import perform

    return perform(options)


if __name__ == "__main__":
    sys.exit(main())
