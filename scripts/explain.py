"""The plan of a kernel as text: `python scripts/explain.py gqa`; fmha without a name.

Nothing is compiled: a plan is data."""

from __future__ import annotations

import sys
from functools import partial

from workbench.command import main_of
from workbench.commands import EXPLAIN

main = partial(main_of, EXPLAIN, __doc__, default="fmha")

if __name__ == "__main__":
    sys.exit(main())
