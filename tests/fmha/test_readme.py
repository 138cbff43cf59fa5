"""The maps in fmha/README.md are what `scripts/explain.py` prints today."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_readme_shows_the_live_plan():
    command = [sys.executable, ROOT / "scripts" / "explain.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    printed = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    ).stdout
    readme = (ROOT / "fmha" / "README.md").read_text(encoding="utf-8")
    headline, body = printed.strip().split("\n\n", maxsplit=1)
    assert "head_dim 64" in headline
    assert body in readme
