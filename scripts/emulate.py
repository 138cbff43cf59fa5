"""Run kernels in the emulator and draw what overlaps: `python scripts/emulate.py gqa`.

Writes a Perfetto trace, which ui.perfetto.dev opens, and a picture; fmha without a name."""

from __future__ import annotations

import sys
from functools import partial

import _checkout  # noqa: F401 - lab is found
from lab.commands import EMULATE
from lab.tools.command import main_of

main = partial(main_of, EMULATE, __doc__, default="fmha")

if __name__ == "__main__":
    sys.exit(main())
