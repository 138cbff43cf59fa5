"""Same as `run.py dsv4`."""

import sys

import _checkout  # noqa: F401 - lab is found
from lab.commands import RUN

if __name__ == "__main__":
    sys.exit(RUN["dsv4"].main("run_dsv4.py"))
