"""Benchmarks by name: `python scripts/bench.py gqa --batch 1 8`.

Each prints static figures on every machine, and times if its kernel can run here."""

from __future__ import annotations

import sys
from functools import partial

import _checkout  # noqa: F401 - lab is found
from lab.commands import BENCH
from lab.tools.command import main_of

main = partial(main_of, BENCH, __doc__)

if __name__ == "__main__":
    sys.exit(main())
