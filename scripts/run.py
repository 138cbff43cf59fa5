"""Run kernels by name and see how exact they are: `python scripts/run.py gqa --kv-len 8k`.

The GPU runs a kernel if it supports it; otherwise the emulator runs its PTX."""

from __future__ import annotations

import sys
from functools import partial

import _checkout  # noqa: F401 - lab is found
from lab.commands import RUN
from lab.tools.command import main_of

main = partial(main_of, RUN, __doc__)

if __name__ == "__main__":
    sys.exit(main())
