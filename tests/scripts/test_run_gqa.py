"""run_gqa from outside: what it prints and writes, its exit codes, and where it runs."""

from __future__ import annotations

import argparse
import json

import pytest
import torch

EVERYTHING = (
    "--BS 2 --kvL 40,3 --kvH 1 --qH 3 --qL 2 --D 64 --dtype fp16 --kv-dtype e4m3 --out-dtype fp32 "
    "--page-size 8 --window 20 --sink-tokens 3 --softcap 4 --sinks --cluster 2 --pdl --arch sm_90a"
)


def test_a_bit_of_everything(run, tmp_path):
    report = tmp_path / "row.json"
    result = run("run_gqa.py", *EVERYTHING.split(), "--check", "--json", report)
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
    assert row["case"].startswith(
        "BS2 kvL40,3 kvH1 qH3 qL2 d64 fp16/e4m3 pages(8) sinks window(20)"
    )


def test_out_of_tolerance_is_a_failure(run):
    flags = ("--kvL", "9", "--kvH", "1", "--qH", "1", "--D", "64", "--arch", "sm_90a")
    result = run("run_gqa.py", *flags, "--tolerance", "1e-6")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "out of tolerance" in result.stdout


def place(backend, arch, *, check=False, capability=None, monkeypatch=None):
    """What is chosen on a machine with a GPU of this capability, or none."""
    from workbench.run import gqa as _run_gqa

    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    asked = argparse.Namespace(
        backend=backend, arch=arch, check=check, strict=False, check_json=None
    )
    _run_gqa.choose_place(asked)
    return asked.backend, asked.arch


HERE = [  # (backend, arch), checked, capability of the GPU -> (backend, arch)
    (("auto", None), False, None, ("emulate", "sm_100a")),
    (("auto", "sm_90a"), False, None, ("emulate", "sm_90a")),
    (("auto", None), False, (9, 0), ("cuda", "sm_90a")),
    (("auto", "sm_90a"), False, (9, 0), ("cuda", "sm_90a")),
    (("auto", "sm_100a"), False, (9, 0), ("emulate", "sm_100a")),
    (("auto", "sm_100a"), False, (10, 3), ("cuda", "sm_103a")),
    (("auto", None), True, (9, 0), ("emulate", "sm_100a")),
    (("auto", None), False, (8, 0), ("emulate", "sm_100a")),
]


@pytest.mark.parametrize(("asked", "check", "capability", "expected"), HERE)
def test_where_it_runs(asked, check, capability, expected, monkeypatch):
    found = place(*asked, check=check, capability=capability, monkeypatch=monkeypatch)
    assert found == expected


def test_where_it_does_not_run(monkeypatch):
    with pytest.raises(ValueError, match="no GPU"):
        place("cuda", None, monkeypatch=monkeypatch)
    with pytest.raises(ValueError, match="the checker is the emulator's"):
        place("cuda", None, check=True, capability=(9, 0), monkeypatch=monkeypatch)
