"""The top README tells the truth: its Python runs, its commands and its tree exist."""

from __future__ import annotations

import re
import subprocess

from workbench.house.source import PACKAGES, ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_python_of_the_readme_runs():
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict = {}
    exec(program, names)
    assert names["out"].shape == (1, 200, 8, 64)
    assert names["lse"].shape == (1, 8, 200)


def test_commands_of_the_readme_are_targets():
    targets = set(re.findall(r"\bmake ([a-z]+)", README))
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {"demo", "test", "matrix"} <= targets <= set(re.findall(r"make (\w+)", listed.stdout))


def test_tree_of_the_readme_exists():
    drawn = set(re.findall(r"^    (\w[\w./]*/|notes/log\.md) ", README, re.MULTILINE))
    assert {"tests/", "scripts/", "notes/log.md"} <= drawn
    missing = [name for name in drawn if not (ROOT / name).exists()]
    assert not missing
    undrawn = [name for name in PACKAGES if (ROOT / name).is_dir() and f"{name}/" not in drawn]
    assert not undrawn


def test_scripts_of_the_readme_exist():
    (listed,) = re.findall(r"^    scripts/ +([\w, ]+)$", README, re.MULTILINE)
    names = listed.split(", ")
    assert {"run_fmha", "explain", "bench"} <= set(names)
    assert not [name for name in names if not (ROOT / "scripts" / f"{name}.py").exists()]
