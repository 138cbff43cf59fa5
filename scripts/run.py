"""Run kernels by name and see how exact they are: `python scripts/run.py gqa --kv-len 8k`.

A GPU that a kernel is written for runs it; everywhere else the emulator runs its PTX."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from workbench.command import main_of
from workbench.commands import RUN


def main(argv: Sequence[str] | None = None) -> int:
    return main_of(RUN, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
