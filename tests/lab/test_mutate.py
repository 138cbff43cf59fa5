"""scripts/mutate.py: the list, the table, and the resumption of an interrupted campaign."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from lab.house.source import ROOT

SUBJECT = "64 base"
COMMITS = ("--subject", SUBJECT, "--kind", "remove commit", "--jobs", "1")


@pytest.fixture
def mutate(monkeypatch):
    """The command in this process: mutate(*arguments) -> exit code."""
    import mutate
    from lab.mutation import campaign

    def run(*arguments):
        monkeypatch.setattr(campaign.signal, "signal", lambda *_: None)
        return mutate.main([*map(str, arguments)])

    monkeypatch.setenv("COLUMNS", "200")
    return run


def test_classes_say_what_they_do():
    """The test runs in a fresh process without PYTHONPATH: the script finds the tests by itself."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "scripts/mutate.py", "--classes"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "remove mbarrier wait: goes on at once (mbarrier.try_wait)." in result.stdout
    assert "Equivalent where the thread has waited for this phase" in result.stdout


def test_list_judges_nothing(mutate, tmp_path, capsys):
    assert mutate(*COMMITS, "--list", "--json", tmp_path / "records.json") == 0
    assert f"{SUBJECT}: 5 mutants, 0 of them equivalent by rule" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flag", ["--subject", "--kind"])
def test_a_choice_of_nothing_is_refused(mutate, capsys, flag):
    assert mutate("--subject", SUBJECT if flag == "--kind" else "nobody", flag, "nothing") == 2
    assert "nothing" in capsys.readouterr().err


def test_a_sample_is_the_same_for_a_seed(mutate, capsys):
    samples = []
    for seed in (1, 1, 2):
        assert mutate("--subject", SUBJECT, "--sample", 5, "--seed", seed, "--list") == 0
        samples.append(capsys.readouterr().out)
    assert samples[0] == samples[1] != samples[2]
    assert f"{SUBJECT}: 5 mutants" in samples[0]


def test_a_campaign_goes_on_where_it_stopped(mutate, tmp_path, capsys):
    path = tmp_path / "records.json"
    assert mutate(*COMMITS, "--json", path) == 0
    shown = capsys.readouterr().out
    assert "5 mutants, 0.0% equivalent (limit 15%), of the rest 100.0% killed" in shown
    document = json.loads(path.read_text())
    assert [row["by"] for row in document["mutants"]] == ["deadlock"] * 5
    document["mutants"][0]["how"] = "as told before"  # shows that it is not judged again
    del document["mutants"][1]
    path.write_text(json.dumps(document))
    assert mutate(*COMMITS, "--json", path) == 0
    how = [row["how"] for row in json.loads(path.read_text())["mutants"]]
    assert how[0] == "as told before"
    assert len(how) == 5
    document["mutants"][0]["ptx"] = "of another kernel"
    path.write_text(json.dumps(document))
    assert mutate(*COMMITS, "--json", path) == 0
    assert "as told before" not in path.read_text()
