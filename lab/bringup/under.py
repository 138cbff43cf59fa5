"""A command of this repository under another program: `... -m lab.bringup.under TOOL FLAGS --
SCRIPT ARGUMENTS`. The exit code is that of the tool."""

from __future__ import annotations

import subprocess
import sys


def main() -> int:
    """Run it."""
    at = sys.argv.index("--")
    tool, command = sys.argv[1:at], sys.argv[at + 1 :]
    return subprocess.run([*tool, sys.executable, *command], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
