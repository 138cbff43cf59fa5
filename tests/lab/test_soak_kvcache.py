"""soak.py kvcache: a short run, its figures, refusals, and a stored failure."""

from __future__ import annotations

import json

from rich.console import Console

import soak as soak_script
from kvcache.books.prefix import PrefixCache
from lab.flags.kvcache import operations
from lab.soak import random_caches
from lab.soak.random_caches import WEIGHTS
from lab.soak.small_caches import CASES


def run(*arguments: object) -> int:
    """Return the script's exit code for these arguments."""
    return soak_script.main(["kvcache", *map(str, arguments)])


def test_a_short_run(tmp_path, capsys):
    figures = tmp_path / "soak.json"
    flags = ("--operations", 200, "--layout", "plain", "--jobs", 1, "--every", 4)
    assert run(*flags, "--json", figures) == 0
    assert "200 operations on 1 caches" in capsys.readouterr().out
    document = json.loads(figures.read_text(encoding="utf-8"))
    counts = document["counts"]
    assert document["operations"] == sum(counts.get(kind, 0) for kind in WEIGHTS) == 200
    assert set(document["cases"]) == {"plain"}


def test_the_cases_take_turns_with_seeds_of_their_own():
    lives = list(random_caches.lives(["a", "b"], 2 * random_caches.LIFE + 5, seed=7))
    assert lives == [("a", 7, random_caches.LIFE), ("b", 7, random_caches.LIFE), ("a", 8, 5)]
    assert operations("50k") == 50_000
    assert operations("2m") == 2_000_000
    assert operations("31") == 31


def test_what_it_refuses(capsys):
    assert run("--layout", "nonsense") == 2
    error = capsys.readouterr().err
    assert all(name in error for name in CASES)
    assert run("--operations", 0) == 2


def test_a_failure_is_made_short_and_stored(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(PrefixCache, "forget", lambda self, slot: None)
    monkeypatch.setattr(random_caches, "FAILURE", tmp_path / "failure.json")
    failed = random_caches.run("plain", seed=0, operations=2000)
    assert random_caches.report(Console(), failed) == 1
    stored = json.loads(random_caches.FAILURE.read_text(encoding="utf-8"))
    assert stored["case"] == "plain"
    assert len(stored["log"]) <= 10
    assert run("--replay", random_caches.FAILURE) == 1
    monkeypatch.undo()
    assert run("--replay", tmp_path / "failure.json") == 0
    assert "nothing fails" in capsys.readouterr().out
