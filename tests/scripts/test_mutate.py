"""scripts/mutate.py from outside: the list, the table, and that an interrupted campaign goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.house.source import ROOT

COMMITS = ("--subject", "minimal", "--kind", "remove commit", "--jobs", "1")


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Without PYTHONPATH: the script finds the tests by itself."""
    environment = {name: v for name, v in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "scripts/mutate.py", *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, env=environment | {"COLUMNS": "200"}, capture_output=True, text=True
    )


def test_classes_say_what_they_do():
    result = run("--classes")
    assert result.returncode == 0, result.stderr
    assert "remove mbarrier wait: goes on at once (mbarrier.try_wait)." in result.stdout
    assert "Equivalent where every loaded register is used" in result.stdout


def test_list_judges_nothing(tmp_path):
    result = run(*COMMITS, "--list", "--json", tmp_path / "records.json")
    assert result.returncode == 0, result.stderr
    assert "minimal: 2 mutants, 0 of them equivalent by rule" in result.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flags", [("--subject", "nothing"), ("--kind", "nothing")])
def test_a_choice_of_nothing_is_refused(flags):
    result = run("--subject", "minimal", *flags[:2]) if flags[0] == "--kind" else run(*flags)
    assert result.returncode == 2
    assert "nothing" in result.stderr.splitlines()[-1]


def test_a_campaign_goes_on_where_it_stopped(tmp_path):
    path = tmp_path / "records.json"
    result = run(*COMMITS, "--json", path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "2 mutants, 0.0% equivalent (limit 15%), of the rest 100.0% killed" in result.stdout
    document = json.loads(path.read_text())
    assert [row["by"] for row in document["mutants"]] == ["deadlock", "deadlock"]
    document["mutants"][0]["how"] = "as told before"  # shows that it is not judged again
    del document["mutants"][1]
    path.write_text(json.dumps(document))
    assert run(*COMMITS, "--json", path).returncode == 0
    how = [row["how"] for row in json.loads(path.read_text())["mutants"]]
    assert how[0] == "as told before"
    assert len(how) == 2
