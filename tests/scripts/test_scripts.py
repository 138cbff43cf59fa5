"""The scripts from outside: --help, what explain prints, exit codes, the files they write."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fmha.config import AttentionConfig
from fmha.plan import make_plan
from tests.house.source import ROOT

SCRIPTS = sorted(path.name for path in (ROOT / "scripts").glob("[a-z]*.py"))
TINY = ("--shape", "1,5,7,1,1")


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a script as a user would, from the root of the repository."""
    command = [sys.executable, f"scripts/{script}", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(script):
    result = run(script, "--help")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("usage: ")


def test_explain_prints_the_whole_plan():
    plan = make_plan(AttentionConfig(mask="causal", kv_stages=4))
    result = run("explain.py", "--mask", "causal", "--kv-stages", "4")
    assert result.returncode == 0, result.stderr
    words = set(result.stdout.replace(",", " ").split())
    assert {role.name for role in plan.roles.roles} <= words
    assert {edge.name for edge in plan.edges.edges} <= words
    assert {buffer.name for buffer in plan.smem.buffers} <= words
    assert {item.name for item in plan.tmem.ranges} <= words
    assert f"{plan.smem.bytes:,} of" in result.stdout


def test_the_readme_of_fmha_shows_the_live_plan():
    _, _, plan = run("explain.py").stdout.partition("\n\n")
    assert plan.startswith("Roles: ")
    assert plan.strip() in (ROOT / "fmha" / "README.md").read_text(encoding="utf-8")


def test_explain_refuses_by_value():
    result = run("explain.py", "--head-dim", "63")
    assert result.returncode == 1
    assert "head_dim 63" in result.stderr


def test_run_fmha_measures(tmp_path):
    report = tmp_path / "rows.json"
    result = run("run_fmha.py", *TINY, "--backend", "emulate", "--json", report)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "all within tolerance" in result.stdout
    (row,) = json.loads(report.read_text())["rows"]
    assert row["ok"]
    assert row["max_error"] > 0
    assert 0 < row["of_limit"] <= 1
    roles = {role.name for role in make_plan(AttentionConfig()).roles.roles}
    assert set(row["roles"]) == roles
    assert all(count > 0 for count in row["roles"].values())


def test_run_fmha_fails_out_of_tolerance():
    result = run("run_fmha.py", *TINY, "--backend", "emulate", "--tolerance", "1e-6")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "1 of 1 out of tolerance" in result.stdout


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_run_fmha_excuses_no_special_value(monkeypatch, value):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import run_fmha

    case = run_fmha.Case(1, 5, 7, 1, 1)
    exact = run_fmha.reference.definition(*case.inputs())
    assert run_fmha.judge(case, (exact.o, exact.lse), slack=1.0)["of_limit"] == 0.0
    wrong = exact.o.clone()
    wrong[0, 3, 0, 17] = value
    assert run_fmha.judge(case, (wrong, exact.lse), slack=1e9)["of_limit"] == float("inf")


def test_emulate_writes_the_timeline(tmp_path):
    result = run("emulate.py", *TINY, "--out", tmp_path / "timeline")
    assert result.returncode == 0, result.stderr
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    agents = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {f"warp {warp}" for warp in range(6)} <= agents
    assert _is_png(tmp_path / "timeline.png")
    again = run("timeline_png.py", tmp_path / "timeline.json", tmp_path / "again.png")
    assert again.returncode == 0, again.stderr
    assert _is_png(tmp_path / "again.png")


def test_dump_writes_the_ptx(tmp_path):
    result = run("dump.py", "--out", tmp_path)
    assert result.returncode == 0, result.stderr
    (ptx,) = tmp_path.glob("*.ptx")
    assert ".target sm_100a" in ptx.read_text()
    assert "tensor core" in result.stdout


def _is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG\r\n")
