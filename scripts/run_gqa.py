"""Same as `run.py gqa`."""

import sys

import _checkout  # noqa: F401 - lab is found
from lab.commands import RUN

if __name__ == "__main__":
    sys.exit(RUN["gqa"].main("run_gqa.py"))
