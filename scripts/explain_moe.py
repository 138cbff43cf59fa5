"""The plan of a layer's grouped GEMM as text: which tiles, who does what, and what lies where.

The flags are those of run_moe.py; --product says which of the two it is. Nothing is compiled.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from workbench.flags.moe import add_layer_arguments, add_product_arguments


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_layer_arguments(parser)
    add_product_arguments(parser)
    options = parser.parse_args(argv)
    from workbench.explain.moe import perform

    return perform(options)


if __name__ == "__main__":
    sys.exit(main())
