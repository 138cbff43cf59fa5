"""What the compiler made of a kernel: `python scripts/dump.py gqa`; fmha without a name.

Behind the name stand the flags that spell a case. PTX needs no GPU; registers and SASS need
NVIDIA's cuobjdump and nvdisasm, which `pip install '.[sass]'` brings.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from workbench.common import main_of

# name -> module beside this file that has its main()
KERNELS = {"fmha": "dump_fmha", "gqa": "dump_gqa", "moe": "dump_moe"}


def main(argv: Sequence[str] | None = None) -> int:
    return main_of(KERNELS, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
