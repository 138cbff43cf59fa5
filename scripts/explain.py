"""The plan of a kernel as text: `python scripts/explain.py gqa`; fmha without a name.

Behind the name stand the flags that spell a case. Nothing is compiled: a plan is data.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from workbench.common import main_of

# name -> module beside this file that has its main()
KERNELS = {"fmha": "explain_fmha", "gqa": "explain_gqa", "moe": "explain_moe"}


def main(argv: Sequence[str] | None = None) -> int:
    return main_of(KERNELS, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
