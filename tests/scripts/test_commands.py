"""Commands that take a name: what they know, how they refuse, and steps in all of them."""

from __future__ import annotations

import json

import pytest

from workbench.commands import BENCH, DUMP, EMULATE, EXPLAIN, RUN
from workbench.flags.steps import FAMILIES, STEPS


def test_every_kernel_is_known_to_every_command():
    kernels = {"fmha", "gqa", "moe", *STEPS}
    for commands in (RUN, DUMP, EXPLAIN, EMULATE):
        assert kernels <= set(commands)
    assert {"fmha", "gqa", *FAMILIES} <= set(BENCH)


@pytest.mark.parametrize("script", ["run.py", "bench.py"])
def test_without_a_name_the_names_are_listed(run, script):
    listed = run(script, "--help").stdout
    assert listed.startswith(f"usage: {script} NAME [FLAGS]")
    assert "  gqa " in listed
    assert run(script).returncode == 2


def test_a_name_that_there_is_not(run):
    result = run("explain.py", "attention", "--causal")
    assert result.returncode == 2
    assert "'attention' is none of fmha, gqa, moe" in result.stderr


def test_older_spellings_are_the_same_flags():
    parser = RUN["gqa"].parser("")
    new = "--batch 2 --kv-len 40,3 --kv-heads 1 --q-heads 3 --q-len 2 --head-dim 64 --no-causal"
    old = "--BS 2 --kvL 40,3 --kvH 1 --qH 3 --qL 2 --D 64 --full"
    assert parser.parse_args(new.split()) == parser.parse_args(old.split())
    assert "--kvL" not in parser.format_help()


def test_a_step_runs_and_is_compared(run, tmp_path):
    report = tmp_path / "rows.json"
    flags = ("--names", "bf16_512", "--rows", 3, "--check", "--json", report)
    result = run("run.py", "append", *flags)
    assert result.returncode == 0, result.stdout + result.stderr
    written = json.loads(report.read_text())
    (row,) = written["rows"]
    assert (row["tokens"], row["launches"], row["wrong"]) == (3, 1, "")
    assert written["checks"]["errors"] == 0


@pytest.mark.parametrize(("step", "flags", "words"), [
    ("append", ("--names", "nothing"), "no problem of append has one of ['nothing'] in its name"),
    ("host", (), "host needs a GPU and its bus"),
])  # fmt: skip
def test_steps_that_are_refused(run, step, flags, words):
    result = run("run.py", step, *flags)
    assert result.returncode == 2
    assert words in result.stderr


def test_a_step_is_explained_by_its_kernels_and_their_plans(run):
    out = run("explain.py", "score", "--rows", 2).stdout
    assert "fmha.sparse.indexer.sm100.signature for sm_100a: " in out
    assert "Tensor memory: " in out
    assert "fmha.sparse.indexer.scores_kernel for sm_100a: record indexer_fp8" in out


def test_a_step_is_dumped(run, tmp_path, whole_ptxas):
    flags = ("--names", "K and V", "--out", tmp_path, "--json", tmp_path / "figures.json")
    result = run("dump.py", "append", *flags)
    assert result.returncode == 0, result.stdout + result.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["ptx"]["memory"] > 0
    (ptx,) = tmp_path.glob("*.ptx")
    assert ".target sm_100a" in ptx.read_text()


def test_decode_is_drawn_with_the_names_of_its_plan(run, tmp_path):
    flags = ("--kv-len", 40, "--kv-heads", 1, "--q-heads", 1, "--head-dim", 64)
    result = run("emulate.py", "gqa", *flags, "--out", tmp_path / "t")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "  load_kv " in result.stdout
    names = {e["name"] for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"]}
    assert {"epilogue", "ring[0]", "wait kv[0]"} <= names
    assert run("emulate.py", "gqa", *flags, "--launch", 3).returncode == 2
