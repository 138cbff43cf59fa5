"""The same as `run.py fmha`."""

import sys

from workbench.commands import RUN

if __name__ == "__main__":
    sys.exit(RUN["fmha"].main("run_fmha.py"))
