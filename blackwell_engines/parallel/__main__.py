"""Attention over a shared sequence, compared and timed; `--help` says how."""

from __future__ import annotations

import sys

from blackwell_engines.parallel.measure import main

if __name__ == "__main__":
    sys.exit(main())
