"""What the compiler made of a decode config: PTX, and registers, spills and SASS where it can.

    python scripts/dump.py gqa --kvL 8192 --kvH 8 --qH 64 --arch sm_90a
    python scripts/dump.py gqa --grid --kvL 8192 --kvH 8 --json results/gqa_static.json

The flags are those of run_gqa.py; what is compiled is what `decode` chooses for them. Registers and
SASS need NVIDIA's cuobjdump and nvdisasm, which `pip install '.[sass]'` brings.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from workbench.flags.decode import add_case_arguments


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_case_arguments(parser, default="sm_100a", help="default: sm_100a; --grid takes all")
    wish = "a table instead: every head_dim, number of columns, bf16 and e4m3 keys"
    parser.add_argument("--grid", action="store_true", help=wish)
    parser.add_argument("--out", type=Path, default=Path("out/dump"), help="default: out/dump")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    options = parser.parse_args(argv)
    from workbench.dump.gqa import perform

    return perform(options)


if __name__ == "__main__":
    sys.exit(main())
