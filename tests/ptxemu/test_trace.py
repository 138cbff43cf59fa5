"""The timeline: what is recorded, how agents are ordered, and that the file reads back the same."""

from __future__ import annotations

import json

import pytest

from ptxemu.trace import Trace


def two_ctas() -> Trace:
    trace = Trace()
    trace.span(0, "warp 10", "softmax", 4, 9.5, "compute", tile=0)
    trace.span(0, "warp 9", "wait s", 0, 4, "wait", barrier="s[0]")
    trace.span(0, "tensor core", "mma 128x128x16", 1, 4, "mma")
    trace.span(1, "TMA", "load", 0, 2, "tma", bytes=16384)
    return trace


def test_agents_are_warps_by_number_and_then_units():
    assert two_ctas().agents(0) == ["warp 9", "warp 10", "tensor core"]
    assert two_ctas().ctas() == [0, 1]


def test_span_does_not_end_before_it_starts():
    with pytest.raises(ValueError, match="ends at 1, before its start 2"):
        Trace().span(0, "TMA", "load", 2, 1, "tma")


def test_perfetto_round_trip(tmp_path):
    trace = two_ctas()
    trace.to_perfetto(tmp_path / "trace.json")
    assert Trace.from_perfetto(tmp_path / "trace.json") == trace


def test_perfetto_document(tmp_path):
    two_ctas().to_perfetto(tmp_path / "trace.json")
    document = json.loads((tmp_path / "trace.json").read_text())
    assert "not hardware time" in document["otherData"]["time"]
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in document["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert names == {(0, 0): "warp 9", (0, 1): "warp 10", (0, 2): "tensor core", (1, 0): "TMA"}
    softmax = next(e for e in document["traceEvents"] if e["name"] == "softmax")
    assert (softmax["ts"], softmax["dur"], softmax["tid"]) == (4, 5.5, 1)
    assert softmax["args"] == {"tile": 0}
