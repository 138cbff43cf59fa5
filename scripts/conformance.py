"""Every form that ptxemu knows, run on the GPU at hand and in ptxemu on the same inputs.

python scripts/conformance.py                           the table
python scripts/conformance.py --json results/conformance_h100.json
python scripts/conformance.py --recorded results/conformance_h100.json   without a GPU: ptxemu
                                                        against what was recorded of a GPU
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--recorded", type=Path, help="results to compare ptxemu with, without GPU")
    parser.add_argument("--only", nargs="*", default=[], help="programs whose name has the word")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that emulate")
    arguments = parser.parse_args(argv)
    from workbench.conformance.perform import perform

    return perform(arguments)


if __name__ == "__main__":
    sys.exit(main())
