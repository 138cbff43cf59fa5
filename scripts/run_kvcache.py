"""Same as `run.py kvcache`."""

import sys

import _checkout  # noqa: F401 - lab is found
from lab.commands import RUN

if __name__ == "__main__":
    sys.exit(RUN["kvcache"].main("run_kvcache.py"))
