"""What the compiler made of a kernel: `python scripts/dump.py gqa`; fmha without a name.

PTX needs no GPU; registers and SASS need NVIDIA's cuobjdump and nvdisasm, which
`pip install '.[sass]'` brings."""

from __future__ import annotations

import sys
from functools import partial

from workbench.command import main_of
from workbench.commands import DUMP

main = partial(main_of, DUMP, __doc__, default="fmha")

if __name__ == "__main__":
    sys.exit(main())
