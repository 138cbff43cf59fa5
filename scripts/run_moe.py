"""The same as `run.py moe`."""

import sys

from workbench.commands import RUN

if __name__ == "__main__":
    sys.exit(RUN["moe"].main("run_moe.py"))
