"""The same as `run.py gqa`."""

import sys

from workbench.commands import RUN

if __name__ == "__main__":
    sys.exit(RUN["gqa"].main("run_gqa.py"))
