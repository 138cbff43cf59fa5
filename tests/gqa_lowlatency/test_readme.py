"""gqa_lowlatency/README.md is true: its examples run and are right, its command works."""

from __future__ import annotations

import json
import re

import torch

from gqa_lowlatency import DecodeConfig, reference
from gqa_lowlatency.config import COLUMNS, HEAD_DIMS, MAX_Q_TOKENS, TUNABLE
from gqa_lowlatency.portable.plan import PortablePlan
from lab.house.source import ROOT

README = (ROOT / "gqa_lowlatency" / "README.md").read_text(encoding="utf-8")


def test_examples_run_and_the_last_one_merges():
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict = {}
    torch.manual_seed(0)
    exec(program, names)
    exact = reference.definition(names["q"], names["k"], names["v"])
    torch.testing.assert_close(names["o"].double(), exact.o, rtol=0, atol=0.02)
    torch.testing.assert_close(names["lse"].double(), exact.lse, rtol=0, atol=2e-3)


def test_the_command_is_spelt_as_the_script_takes_it(run):
    (command,) = re.findall(r"^    python (scripts/run_gqa.*)$", README, re.MULTILINE)
    command = command.replace("scripts/run_gqa.py", "run.py gqa")  # the script runs this command
    result = run(command, "--D", "96")  # refused before anything is emulated
    assert result.stderr.startswith("refused: head_dim 96")


def test_numbers_of_the_text():
    assert f"{', '.join(map(str, HEAD_DIMS[:-1]))}, {HEAD_DIMS[-1]}; bfloat16" in README
    assert f"1 to {MAX_Q_TOKENS} query tokens" in README
    assert f"{', '.join(map(str, COLUMNS[:-1]))} or {COLUMNS[-1]} columns" in README
    assert f"`config=DecodeConfig({', '.join(f'{name}=' for name in TUNABLE)})`" in README
    assert f"{PortablePlan(DecodeConfig()).warps}, each streams 16 keys" in README


def test_the_table_is_that_of_the_results(printed):
    (table,) = re.findall(r"^\| batch x keys .*?\n\n", README, re.MULTILINE | re.DOTALL)
    peers = [cell.strip() for cell in table.splitlines()[0].split("|")[3:-1]]
    results = ROOT / "results" / "gqa_h100.json"
    shown = printed("bench.py gqa --show", results, "--markdown", "--peers", *peers)
    assert shown.strip() == table.strip()
    assert json.loads(results.read_text())[0]["date"] in README


def test_the_host_figures_are_those_of_the_results():
    host = json.loads((ROOT / "results" / "eager_h200.json").read_text())["microseconds"]
    call, plan, bare = (host[f"decode{n}"] for n in ("", ", prepared", ", prepared, out="))
    told = f"{call:.1f} us for a call of `decode`, {plan:.1f} for a plan, {bare:.1f} with `out`"
    assert told in " ".join(README.split())
