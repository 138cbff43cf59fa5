"""What the compiler made of a grouped GEMM: PTX, and registers, spills and SASS where it can.

    python scripts/dump.py moe --model deepseek-v4-pro --tokens 64 --experts 8
    python scripts/dump.py moe --grid --json results/moe_static.json

The flags are those of run_moe.py; --product says which of the two GEMMs it is. Registers and SASS
need NVIDIA's cuobjdump and nvdisasm, which `pip install '.[sass]'` brings.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from workbench.flags.moe import add_layer_arguments, add_product_arguments


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_layer_arguments(parser)
    add_product_arguments(parser)
    wish = "a table instead: every tile_rows, formats and outputs"
    parser.add_argument("--grid", action="store_true", help=wish)
    parser.add_argument("--out", type=Path, default=Path("out/dump"), help="default: out/dump")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    options = parser.parse_args(argv)
    from workbench.dump.moe import perform

    return perform(options)


if __name__ == "__main__":
    sys.exit(main())
