"""run.py gqa from outside: what it prints and writes, its exit codes."""

from __future__ import annotations

import json

EVERYTHING = (
    "--batch 2 --kv-len 40,3 --kv-heads 1 --q-heads 3 --q-len 2 --head-dim 64 --dtype fp16 "
    "--kv-dtype e4m3 --out-dtype fp32 --page-size 8 --window 20 --sink-tokens 3 "
    "--softcap 4 --sinks --cluster 2 --pdl --arch sm_90a"
)


def test_a_bit_of_everything(run, tmp_path):
    report = tmp_path / "row.json"
    result = run("run.py", "gqa", *EVERYTHING.split(), "--check", "--json", report)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "no findings in 1 launch; rules: hardware" in result.stdout
    assert "within tolerance" in result.stdout
    written = json.loads(report.read_text())
    assert written["checks"]["errors"] == 0
    row = written["row"]
    assert row["ok"]
    assert 0 < row["of_limit"] <= 1
    assert row["instructions"] > 1000
    assert (row["backend"], row["arch"]) == ("emulate", "sm_90a")
    assert row["case"].startswith("2x40,3 h3/1 b2 d64 fp16/e4m3 pages(8) sinks window(20)")


def test_out_of_tolerance_is_a_failure(run):
    flags = ("--kvL", "9", "--kvH", "1", "--qH", "1", "--D", "64", "--arch", "sm_90a")  # older
    result = run("run.py", "gqa", *flags, "--tolerance", "1e-6")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "out of tolerance" in result.stdout
