"""A report of Nsight Compute of one kernel, and what a slim table keeps of it, which can be sent:

    python -m lab.bringup.profile NAME FOLDER

FOLDER gets NAME.ncu-rep, which has source lines and names of this machine in it, and NAME.csv.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from lab.tools.common import REFUSED

NSIGHT = "scripts/nsight.py"


def main() -> int:
    """Both; the exit code of what failed."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    stem, raw = folder / name, folder / f"{name}.raw"
    code = _run(NSIGHT, name, "--out", str(stem))
    if code:
        return code
    exported = subprocess.run(
        ["ncu", "--import", f"{stem}.ncu-rep", "--page", "raw", "--csv"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if exported.returncode:
        print(exported.stderr.strip() or "ncu --import failed", file=sys.stderr)
        return REFUSED
    raw.write_text(exported.stdout, encoding="utf-8")
    try:
        date = time.strftime("%Y-%m-%d")
        return _run(NSIGHT, "table", str(raw), "--date", date, "--out", f"{stem}.csv")
    finally:
        raw.unlink()


def _run(*words: str) -> int:
    return subprocess.run([sys.executable, *words], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
