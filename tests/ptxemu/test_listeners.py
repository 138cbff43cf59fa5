"""ptxemu.machine.listener: listeners have a method for every event that is announced.

Announcements are dynamic, so no type checker compares the two.
"""

from __future__ import annotations

import ast
import inspect
import json

import pytest

from lab.house.source import ROOT
from ptxemu.machine.listener import Listener
from ptxemu.trace import Trace

EVENTS = {n: inspect.signature(f) for n, f in vars(Listener).items() if inspect.isfunction(f)}


def announced() -> list[tuple[str, ast.Call]]:
    """Return (event, call) for each `for each in ...listeners: each.event(...)`."""
    found = []
    for path in sorted((ROOT / "ptxemu").rglob("*.py")):
        for loop in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(loop, ast.For) or not isinstance(loop.target, ast.Name):
                continue
            if not ast.unparse(loop.iter).endswith("listeners"):
                continue
            for call in ast.walk(loop):
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                    if ast.unparse(call.func.value) == loop.target.id:
                        found.append((call.func.attr, call))
    return found


def test_events_that_are_announced_are_known():
    calls = announced()
    assert len({event for event, _ in calls}) > 20
    for event, call in calls:
        starred = any(isinstance(given, ast.Starred) for given in call.args)
        bind = EVENTS[event].bind_partial if starred else EVENTS[event].bind
        bind(None, *call.args, **{word.arg: None for word in call.keywords})


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
