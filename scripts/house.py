"""Overview of the repository: imports, similar files, hops of a call, lengths."""

from __future__ import annotations

import sys
from functools import partial

import _checkout  # noqa: F401 - lab is found
from lab.house.repository import HOUSE
from lab.tools.command import main_of

main = partial(main_of, HOUSE, __doc__)

if __name__ == "__main__":
    sys.exit(main())
