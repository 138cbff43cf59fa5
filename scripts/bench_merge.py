"""Time `kernelkit.merge.merge` on the CUDA GPU at hand beside a copy of as many bytes.

    python scripts/bench_merge.py [--stacked] [--json out.json]

Launches are replayed from a CUDA graph that rotates over buffers of more than twice the L2 cache,
as far as MAX_SETS of them go: smaller problems are marked warm and say what launches cost. Counted
are the bytes of the parts' O, read, and of the merged O, written; bfloat16, normalised parts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stacked", action="store_true", help="parts as one stacked tensor")
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    options = parser.parse_args(argv)
    from workbench.bench.merge import perform

    return perform(options)


if __name__ == "__main__":
    sys.exit(main())
