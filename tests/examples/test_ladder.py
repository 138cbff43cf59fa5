"""The ladder of examples: each rung is right, the checker reports nothing, and every wait is
needed.
"""

from __future__ import annotations

import re

import pytest
import torch

import demonstrate
import masks
import pieces
from demonstrate import Problem, judge, overlap, run
from lab.house.source import ROOT
from minimal import Minimal
from pipelined import Pipelined
from ptxemu import Options, PtxEmuError
from warp_specialised import WarpSpecialised

RUNGS = (Minimal, Pipelined, WarpSpecialised)
EVERY_RUNG = pytest.mark.parametrize("rung", RUNGS)
# More tiles than stages, a last tile of 8 keys, a second query tile of 2 rows.
PROBLEM = Problem(q_len=130, kv_len=520, mask="causal")
CHECKED = Options(check=True, limit=None)


@EVERY_RUNG
def test_a_rung_is_right_and_the_checker_is_silent(rung):
    o, report = run(rung, PROBLEM, CHECKED)
    verdict = judge(PROBLEM, o)
    assert verdict.ok, str(verdict)
    assert not report.findings


@EVERY_RUNG
def test_bits_are_the_same_under_every_schedule(rung):
    expected, _ = run(rung, PROBLEM, Options(limit=None))
    for seed in (0, 1):
        o, _ = run(rung, PROBLEM, Options(policy="adversarial", seed=seed, limit=None))
        assert torch.equal(o, expected)


@pytest.mark.parametrize("edge", ["s", "q", "k", "v", "p", "o"])
def test_a_wait_that_is_missing_is_reported(edge, monkeypatch):
    """The checker reports it, or the kernel does what no GPU would."""
    make_pipelines = pieces.make_pipelines

    def deaf(plan, storage):
        pipes = make_pipelines(plan, storage)
        wait_less = type("Deaf", (type(pipes[edge]),), {"wait": lambda *_: None})
        return pipes | {edge: wait_less(**vars(pipes[edge]))}

    monkeypatch.setattr(pieces, "make_pipelines", deaf)
    rung = type(f"Without_{edge}", (WarpSpecialised,), {})  # compiled under its own name
    try:
        _, report = run(rung, Problem(mask="causal", kv_len=520), CHECKED)
    except PtxEmuError:
        return
    assert any(finding.check == "race" for finding in report.errors)


def test_a_mask_is_one_function(monkeypatch):
    """The page promises newcomers that one new mask reaches both the kernel and the reference."""
    monkeypatch.setitem(
        masks.MASKS, "window", lambda query, key: (key <= query) & (key > query - 40)
    )
    problem = Problem(q_len=200, kv_len=200, mask="window")
    o, _ = run(Minimal, problem, Options(limit=None))
    assert judge(problem, o).ok
    assert not judge(Problem(q_len=200, kv_len=200, mask="causal"), o).ok


def test_the_page_has_the_numbers_of_today():
    page = (ROOT / "examples/ladder/README.md").read_text(encoding="utf-8")
    for rung in RUNGS:
        _, report = run(rung, Problem(), Options(trace=True, limit=None))
        seen = overlap(report.launches[0].trace)
        busy = [seen.tma, seen.tensor_core, seen.warps]
        shares = " | ".join(f"{part / seen.cycles:.0%}" for part in busy)
        row = f"{seen.cycles:,.0f} | {shares} | {seen.units:.2f}"
        assert re.search(rf"^\| \[`\w+\.py`\].*\| {re.escape(row)} \|$", page, re.MULTILINE), row


def test_the_command_line(capsys):
    assert demonstrate.main(Minimal, ["--kv-len", "100"]) == 0
    assert "0 findings" in capsys.readouterr().out
