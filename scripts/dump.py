"""What the compiler made of a kernel: `python scripts/dump.py gqa`; fmha without a name.

PTX needs no GPU; registers and SASS need NVIDIA's cuobjdump and nvdisasm, which
`pip install '.[sass]'` brings."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from workbench.command import main_of
from workbench.commands import DUMP


def main(argv: Sequence[str] | None = None) -> int:
    return main_of(DUMP, __doc__, argv, default="fmha")


if __name__ == "__main__":
    sys.exit(main())
