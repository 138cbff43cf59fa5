"""The checker on your CuTe DSL kernels: races, data never written, leaks, misused barriers.

    python scripts/check.py [options] script.py [its arguments]
    python scripts/check.py --module path/to/file.py:function [options] [its arguments]

Same as `python -m ptxemu check`, which every installation of ptxemu has.
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
