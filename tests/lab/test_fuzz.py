"""Files from strangers: damaged ones raise named errors, in bounded time and memory.

`python scripts/fuzz.py` reads 20,000 of each kind.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

import fuzz
from lab.fuzz import perform
from lab.fuzz.damage import BINARY, JSON, TEXT, damaged
from lab.fuzz.kinds import KINDS, Kind

FEW, SOME = range(6), range(6, 60)


def read(name: str, seeds: range) -> None:
    verdict = perform.judged(KINDS[name], seeds)
    assert not verdict.failures, "\n".join([verdict.line(), *verdict.failures])


@pytest.mark.parametrize("name", KINDS)
def test_a_few_of_each_kind(name):
    read(name, FEW)


@pytest.mark.parametrize("name", KINDS)
def test_some_of_each_kind(name):
    read(name, SOME)


def test_damage_is_that_of_its_seed():
    data = json.dumps({"a": [1, 2.5, "x", None], "b": {"c": True}}).encode() * 3
    for how in (BINARY, TEXT, JSON):
        found = [damaged(data, how, str(seed)) for seed in range(60)]
        assert found == [damaged(data, how, str(seed)) for seed in range(60)]
        assert len({*found}) > 40
        assert sum(each != data for each in found) > 50


def _raise(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(("act", "words"), [
    (lambda: {}["x"], "KeyError: 'x'"),
    (lambda: _raise(ValueError("")), "ValueError without a message"),
    (lambda: bytearray(perform.ROOM + (1 << 30)), "MemoryError"),
    (lambda: sum(range(10**6)), "s of CPU time"),
])  # fmt: skip
def test_the_judge_can_fail(act: Callable[[], Any], words: str, monkeypatch, capsys):
    """The judge objects to other errors, errors without a message, too much memory, and too much
    time."""
    monkeypatch.setattr(perform, "SECONDS", 0.001)
    begun = []

    def run(*_: Any) -> None:
        begun.append(1)
        if len(begun) > 1:  # the first file is undamaged
            act()

    monkeypatch.setitem(KINDS, "bad", Kind("bad", lambda _: [b"x" * 9], run, BINARY))
    assert fuzz.main(["bad", "--count", "1"]) == 1
    assert words in capsys.readouterr().out


def test_counts_are_written(tmp_path, capsys):
    assert fuzz.main(["tensor-map", "--count", "20", "--json", str(tmp_path / "counts")]) == 0
    assert "tensor-map: 20 files" in capsys.readouterr().out
    (kind,) = json.loads((tmp_path / "counts").read_text())["kinds"]
    assert sum(kind["outcomes"].values()) == 20
    with pytest.raises(SystemExit):
        fuzz.main(["no-such-kind"])
