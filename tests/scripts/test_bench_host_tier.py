"""bench.py kvcache-tier without a GPU: it says so, and shows what an H100 measured."""

from __future__ import annotations

import torch

import bench
from workbench.bench import host_tier as _bench_host_tier
from workbench.house.source import ROOT


def ran(*flags):
    return bench.main(["kvcache-tier", *map(str, flags)])


def test_without_a_gpu_there_is_no_bus(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ran() == 0
    assert "no bus to measure" in capsys.readouterr().out


def test_copy_engines_leave_decode_alone(capsys):
    """Why `kvcache.memory.mover` does not use its own kernel over the bus."""
    path = ROOT / "results" / "kvcache_tier_h100.json"
    rows = [row for row in _bench_host_tier.read_rows(path) if row["kind"] == "tier"]
    slowdown = {(row["way"], row["direction"]): row["slowdown"] for row in rows}
    for direction in ("offload", "fetch"):
        assert slowdown["memcpy", direction] < 1.1 < slowdown["kernel 32", direction]
        assert slowdown["kernel 4224", direction] > 2
    assert ran("--show", path) == 0
    assert "NVIDIA H100" in capsys.readouterr().out
