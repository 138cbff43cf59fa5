"""Same as `run.py moe`."""

import sys

import _checkout  # noqa: F401 - lab is found
from lab.commands import RUN

if __name__ == "__main__":
    sys.exit(RUN["moe"].main("run_moe.py"))
