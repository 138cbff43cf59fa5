"""docs/deepseek_v4.md is true: its program runs and is right, its figures are those of the results,
the names in it exist.
"""

from __future__ import annotations

import json
import re

import torch

from kvcache import gather, preset
from lab.house.source import ROOT
from mla.reference import Token, definition
from mla.workspace import plan_workspace

PAGE = (ROOT / "docs" / "deepseek_v4.md").read_text(encoding="utf-8")
MIB = 1 << 20


def test_the_program_runs_and_is_right():
    """The program's last token is compared with one softmax over the contents of the cache. The
    programs after it go on with its layer."""
    program, *others = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict = {}
    torch.manual_seed(0)
    exec(program, names)
    cache, request, best = (names[name] for name in ("cache", "request", "best"))
    last = names["tokens"] - 1
    ring = request.state * 128 + torch.arange(last + 1)
    entries, chosen = best
    assert chosen[last] == names["k"]
    near, far = torch.empty(len(ring), 512).bfloat16(), torch.empty(names["k"], 512).bfloat16()
    gather(cache.rows("swa", 0), ring, near)
    gather(cache.rows("csa", 0), entries[last], far)
    sinks = torch.zeros(names["heads"])
    exact = definition(Token(names["q"][last], last, near, far, names["rope"], sinks))
    assert (names["o"][last].double() - exact).abs().max() < 0.02
    for program in others:
        exec(program, names)


def test_the_workspace_of_v4_pro():
    needs = plan_workspace(
        preset("deepseek-v4-pro", draft=1), 128, tokens=128, requests=1, longest=128, selected=1024
    )
    gathered = 128 * 1024 * 1024
    assert f"takes {needs.size(128) / MIB:.0f} MiB" in PAGE
    assert re.search(f"of which {gathered / MIB:.0f} MiB\\s+are selected entries", PAGE)


def test_what_it_names_exists():
    for name in re.findall(r"`((?:scripts|kvcache|fmha|docs|results)/[\w./]+)`", PAGE):
        assert (ROOT / name).exists(), name


def test_the_table_is_that_of_the_results(printed):
    (table,) = re.findall(r"^\| step \| 1 \|.*?\n\n", PAGE, re.MULTILINE | re.DOTALL)
    results = ROOT / "results" / "dsv4_h100.json"
    shown = printed("bench.py dsv4 --show", results, "--markdown")
    assert shown.strip().splitlines() == table.strip().splitlines()
    assert json.loads(results.read_text())[0]["date"] in PAGE
