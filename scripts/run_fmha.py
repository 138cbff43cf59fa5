"""Same as `run.py fmha`."""

import sys

import _checkout  # noqa: F401 - lab is found
from lab.commands import RUN

if __name__ == "__main__":
    sys.exit(RUN["fmha"].main("run_fmha.py"))
