"""Benchmarks by name: `python scripts/bench.py gqa --batch 1 8`.

Each prints what can be said on this machine: static figures everywhere, times where its kernel can
run."""

from __future__ import annotations

import sys
from functools import partial

from workbench.command import main_of
from workbench.commands import BENCH

main = partial(main_of, BENCH, __doc__)

if __name__ == "__main__":
    sys.exit(main())
