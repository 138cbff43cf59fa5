"""The same as `run.py kvcache`."""

import sys

from workbench.commands import RUN

if __name__ == "__main__":
    sys.exit(RUN["kvcache"].main("run_kvcache.py"))
