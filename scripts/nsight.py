"""Run Nsight Compute or Nsight Systems on a kernel of run.py.

    python scripts/nsight.py fmha --tool ncu -- --shape 2,4k,4k,16,16 --causal --unjudged

If the tool is not installed, it prints the command line to use elsewhere.
"""

import sys

import _checkout  # noqa: F401 - lab is found
from lab.verbs.nsight import main

if __name__ == "__main__":
    sys.exit(main())
