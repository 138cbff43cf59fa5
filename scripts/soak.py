"""Long runs of random work, each compared with a reference: `python scripts/soak.py fmha`.

    python scripts/soak.py kvcache --operations 50k --layout sparse --seed 7
    python scripts/soak.py fmha --minutes 8 --json out/soak.json
    python scripts/soak.py moe --minutes 8 --graphs

Without a name, the flags are those of kvcache. Exit code 0: nothing failed; 1: something did; 2:
refused."""

from __future__ import annotations

import sys
from functools import partial

import _checkout  # noqa: F401 - lab is found
from lab.commands import SOAK
from lab.tools.command import main_of

main = partial(main_of, SOAK, __doc__, default="kvcache")

if __name__ == "__main__":
    sys.exit(main())
