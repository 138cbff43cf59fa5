"""Scripts that lack an optional package print one line: which one, and the extra that has it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lab.house.source import ROOT
from lab.tools.common import EXTRA_OF, lacking

# Loaded by every Python process that finds it on its path: finders then miss these packages.
HIDING = f"""
import sys
class Hiding:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, *more):
        if name.partition(".")[0] not in {[*EXTRA_OF, "_pytest", "hypothesis"]}:
            return self.finder.find_spec(name, *more)
sys.meta_path[:] = map(Hiding, sys.meta_path)
"""
LACKING = [
    ("run.py fmha --shape 1,5,7,1,1", "rich", "scripts"),
    ("run.py kvcache --layers 1", "rich", "scripts"),
    ("explain.py fmha", "rich", "scripts"),
    ("dump.py fmha", "rich", "scripts"),
    ("emulate.py append", "matplotlib", "scripts"),
    ("cycles.py append", "rich", "scripts"),
    ("bench.py gqa --show results/gqa_h100.json", "rich", "scripts"),
    ("soak.py fmha --backend emulate", "rich", "scripts"),
    ("fuzz.py gguf", "gguf", "scripts"),
    ("fuzz.py safetensors", "safetensors", "scripts"),
    ("mutate.py --list", "rich", "scripts"),
    ("plan.py --plot out/plan.png", "matplotlib", "scripts"),
    ("report.py --out out/report", "matplotlib", "scripts"),
]
WHOLE = ["house.py files", "plan.py", "check.py --help", "report.py --list", "nsight.py fmha"]


def started(command: str, folder) -> subprocess.CompletedProcess:
    """Run a script in a process without optional packages."""
    (folder / "sitecustomize.py").write_text(HIDING)
    path = os.pathsep.join([str(folder), str(ROOT), str(ROOT / "scripts")])
    script, *words = command.split()
    return subprocess.run(
        [sys.executable, f"scripts/{script}", *words],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.parametrize(("command", "package", "extra"), LACKING)
def test_a_script_says_what_to_install(tmp_path, command, package, extra):
    done = started(command, tmp_path)
    wanted = f"refused: {package} is not installed: pip install '.[{extra}]' in the checkout\n"
    assert (done.returncode, done.stderr) == (2, wanted)


@pytest.mark.parametrize("command", WHOLE)
def test_others_need_none(tmp_path, command):
    done = started(command, tmp_path)
    assert done.returncode == 0, done.stderr


def test_other_import_errors_stay():
    assert lacking(ModuleNotFoundError("No module named 'mine'", name="mine")) == ""
    assert lacking(ImportError("cannot import name 'x'", name="rich")) == ""
    assert lacking(ImportError("nothing")) == ""
