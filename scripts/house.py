"""The repository from above: imports, files side by side, hops of a call, lengths."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from workbench.command import main_of
from workbench.house.commands import HOUSE


def main(argv: Sequence[str] | None = None) -> int:
    return main_of(HOUSE, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
