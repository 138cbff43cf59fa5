"""The checker on CuTe DSL kernels of your own: races, data never written, leaks, misused barriers.

    python scripts/check.py [options] script.py [its arguments]
    python scripts/check.py --module path/to/file.py:function [options] [its arguments]

The same as `python -m ptxemu check`, which is there wherever ptxemu is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ptxemu.commands import check


def main(argv: Sequence[str] | None = None) -> int:
    """What the flags ask for; returns the exit code."""
    return check.main(None if argv is None else [*argv])


if __name__ == "__main__":
    sys.exit(main())
