"""The repository from above: imports, files side by side, hops of a call, lengths."""

from __future__ import annotations

import sys
from functools import partial

from workbench.command import main_of
from workbench.house.commands import HOUSE

main = partial(main_of, HOUSE, __doc__)

if __name__ == "__main__":
    sys.exit(main())
