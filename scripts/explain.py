"""The plan of a kernel as text: `python scripts/explain.py gqa`; fmha without a name.

Behind the name stand the flags that spell a case. Nothing is compiled: a plan is data.
"""

from __future__ import annotations

import sys

from _common import main_of

# name -> module beside this file whose main() parses sys.argv
KERNELS = {"fmha": "explain_fmha", "gqa": "explain_gqa", "moe": "explain_moe"}

if __name__ == "__main__":
    sys.exit(main_of(KERNELS, __doc__))
