"""bench.py kvcache-tier without a GPU: it says so, and shows what an H100 measured."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.house.source import ROOT

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "scripts")
    import bench
    import bench_host_tier


def ran(monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["bench.py", "kvcache-tier", *map(str, flags)])
    return bench.main()


def test_without_a_gpu_there_is_no_bus(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ran(monkeypatch) == 0
    assert "no bus to measure" in capsys.readouterr().out


def test_copy_engines_leave_decode_alone(monkeypatch, capsys):
    """Why `kvcache.mover` does not use its own kernel over the bus."""
    path = ROOT / "results" / "kvcache_tier_h100.json"
    rows = [row for row in bench_host_tier.read_rows(path) if row["kind"] == "tier"]
    slowdown = {(row["way"], row["direction"]): row["slowdown"] for row in rows}
    for direction in ("offload", "fetch"):
        assert slowdown["memcpy", direction] < 1.1 < slowdown["kernel 32", direction]
        assert slowdown["kernel 4224", direction] > 2
    assert ran(monkeypatch, "--show", path) == 0
    assert "NVIDIA H100" in capsys.readouterr().out
