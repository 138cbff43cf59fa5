"""The plan of a kernel as text: `python scripts/explain.py gqa`; fmha without a name.

Nothing is compiled: a plan is data."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from workbench.command import main_of
from workbench.commands import EXPLAIN


def main(argv: Sequence[str] | None = None) -> int:
    return main_of(EXPLAIN, __doc__, argv, default="fmha")


if __name__ == "__main__":
    sys.exit(main())
