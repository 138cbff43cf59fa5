"""The compiler's output for a kernel: `python scripts/dump.py gqa`; fmha without a name.

PTX needs no GPU; registers and SASS need NVIDIA's cuobjdump and nvdisasm:
`pip install '.[sass]'`."""

from __future__ import annotations

import sys
from functools import partial

import _checkout  # noqa: F401 - lab is found
from lab.commands import DUMP
from lab.tools.command import main_of

main = partial(main_of, DUMP, __doc__, default="fmha")

if __name__ == "__main__":
    sys.exit(main())
