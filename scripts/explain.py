"""The plan of a kernel as text: `python scripts/explain.py gqa`; fmha without a name.

Nothing is compiled: a plan is data."""

from __future__ import annotations

import sys
from functools import partial

import _checkout  # noqa: F401 - lab is found
from lab.commands import EXPLAIN
from lab.tools.command import main_of

main = partial(main_of, EXPLAIN, __doc__, default="fmha")

if __name__ == "__main__":
    sys.exit(main())
