"""What judges a server under load, without an engine: requests, answers of both APIs, reports."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from lab.engines import newest
from lab.engines.judge import Verdict
from lab.engines.load import Report, wrong
from lab.engines.run import EngineError
from lab.engines.server import Server, requests


@pytest.fixture
def client(monkeypatch) -> ModuleType:
    """The client, without the package that only the engines' environment has."""
    http = ModuleType("aiohttp")
    http.ClientTimeout = lambda total: total
    monkeypatch.setitem(sys.modules, "aiohttp", http)
    sys.modules.pop("lab.engines.client", None)
    from lab.engines import client

    return client


def test_requests_are_drawn_alike_and_some_leave():
    drawn = requests(200, 7)
    assert drawn == requests(200, 7) != requests(200, 8)
    assert all(1 <= len(r["prompt"]) <= 90 for r in drawn)
    leaving = [r for r in drawn if r["leave_after"]]
    assert 10 < len(leaving) < 60
    assert all(r["stream"] and r["leave_after"] <= r["tokens"] for r in leaving)
    assert any(a["prompt"][:5] == b["prompt"][:5] for a in drawn for b in drawn if a is not b)


def test_pieces_of_both_apis(client):
    piece = {"choices": [{"token_ids": [3, 4]}]}
    assert client.vllm_tokens(piece, [1, 2]) == [1, 2, 3, 4]
    assert client.vllm_tokens({"choices": []}, [1, 2]) == [1, 2]
    assert client.sglang_tokens({"output_ids": [1, 2, 3]}, [1, 2]) == [1, 2, 3]


@pytest.mark.parametrize(
    ("tokens", "leave_after", "lines"),
    [([5, 6], None, 0), ([5], None, 1), ([5], 1, 0), ([], 1, 1), ([5, 7], None, 1)],
)
def test_wrong_and_missing_tokens(tokens, leave_after, lines):
    def judge(prompt, answers):
        return Verdict(0.0, 0.0, 3.0 if 7 in answers[0]["tokens"] else 0.0)

    request = {"prompt": [1], "tokens": 2, "leave_after": leave_after}
    found = wrong(SimpleNamespace(judge=judge), [request], [{"tokens": tokens}])
    assert len(found) == lines


@pytest.mark.parametrize(
    "changed", [{"wrong": ["x"]}, {"compiled": ["K"]}, {"left": {"blocks": 0.1}}]
)
def test_what_a_report_does_not_accept(changed):
    good = {"answers": [{"tokens": [1], "left": False, "seconds": 0.1}], "wrong": [],
            "compiled": [], "left": {"blocks": 0.0}}  # fmt: skip
    assert Report(**good).ok
    assert not Report(**good | changed).ok
    assert "1 requests, 1 tokens; 0 left early" in str(Report(**good | changed))


def test_metrics_of_several_engines_are_summed(monkeypatch, tmp_path):
    name = "vllm:num_requests_running"
    text = f'# HELP {name} x\n{name}{{engine="0"}} 1.0\n{name}{{engine="1"}} 2.0\n'
    others = ("vllm:kv_cache_usage_perc", "vllm:num_requests_waiting")
    monkeypatch.setattr(Server, "page", lambda self, path: text + "".join(
        f"{other} 0.0\n" for other in others
    ))  # fmt: skip
    server = Server("vllm", "llama", "", tmp_path, None)
    assert server.left() == {name: 3.0, **dict.fromkeys(others, 0.0)}
    monkeypatch.setattr(Server, "page", lambda self, path: text)
    with pytest.raises(EngineError, match="/metrics has no vllm:kv_cache_usage_perc"):
        server.left()


def test_changes_are_named():
    before = {"a:f": "(x)", "b:g": "(y)", "c:h": "()"}
    after = {"a:f": "(x)", "b:g": "(y, z)", "c:h": None}
    assert newest.changes(before, after) == ["b:g was (y), is (y, z)", "c:h is gone"]
