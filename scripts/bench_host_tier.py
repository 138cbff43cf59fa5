"""How fast blocks go to the host's memory and back, and what a decode step beside them loses.

    python scripts/bench.py kvcache-tier [--json results/kvcache_tier_h100.json]
    python scripts/bench.py kvcache-tier --show results/kvcache_tier_h100.json

`memcpy`: a copy of each block by the copy engines, as kvcache/memory/mover.py does it; `kernel N`:
one launch of kvcache's own copy kernel with N CTAs, which reads or writes pinned memory over the
bus. They run on a stream of their own, again and again, while CUDA graphs of decode steps (all
layers over the same pool's pages) run on another one. Bytes are compared before anything is
measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

CTAS = (4224, 132, 32, 8)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=128, help="in a transfer")
    parser.add_argument("--ctas", type=int, nargs="*", default=CTAS, help="of the copy kernel")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there as well")
    parser.add_argument("--show", type=Path, metavar="FILE", help="the table of an earlier run")
    options = parser.parse_args(argv)
    from workbench.bench.host_tier import perform

    return perform(options)


if __name__ == "__main__":
    sys.exit(main())
