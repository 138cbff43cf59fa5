"""bench.py kvcache-tier without a GPU: it reports that, and shows what an H100 measured."""

from __future__ import annotations

import torch

from lab.house.source import ROOT
from lab.tools.common import read_rows


def test_without_a_gpu_there_is_no_bus(monkeypatch, printed):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no bus to measure" in printed("bench.py kvcache-tier")


def test_copy_engines_leave_decode_alone(printed):
    """This is why `kvcache.memory.storage` does not use its own kernel over the bus."""
    path = ROOT / "results" / "kvcache_tier_h100.json"
    rows = [row for row in read_rows(path) if row["kind"] == "tier"]
    slowdown = {(row["way"], row["direction"]): row["slowdown"] for row in rows}
    for direction in ("offload", "fetch"):
        assert slowdown["memcpy", direction] < 1.1 < slowdown["kernel 32", direction]
        assert slowdown["kernel 4224", direction] > 2
    assert "NVIDIA H100" in printed("bench.py kvcache-tier --show", path)
