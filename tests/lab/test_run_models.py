"""run.py models: layers of models, and the table of their errors in moe/README.md."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from lab.flags.moe import MODEL_NAMES, ONE_OF_EACH
from lab.house.source import ROOT
from lab.verbs import models
from lab.verbs.models import FORMS, Form
from moe.models import READERS, of_model

RESULTS = ROOT / "results" / "moe_models.json"
# Relative to the norm, with the same weights: the error from rounding x and h.
LARGEST = {"bf16": 0.005, "e4m3": 0.06, "mxfp8": 0.06, "nvfp4": 0.2, "mxfp4": 0.27}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{models.GPUS[form.arch]}, {form}")
def test_a_layer_is_as_exact_as_torch_that_rounds_alike(form):
    """A token of DeepSeek-V4 has six experts and a shared one; the layer has its limit and its
    scores."""
    found = models.errors_of(models.problem_of("deepseek-v4-pro"), form)
    assert found["ok"]
    assert 0 < found["error"] < LARGEST[form.x]


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_reduced_layers_are_those_of_the_models(name):
    whole, small = of_model(name), models.reduced(name)
    assert small == replace(whole, hidden=small.hidden, intermediate=small.intermediate,
                            experts=small.experts)  # fmt: skip
    assert whole.router.top_k <= small.experts <= whole.experts
    assert small.experts % whole.router.n_group == 0


def test_every_family_is_in_the_table():
    layers = {repr(replace(of_model(name), hidden=0, intermediate=0)) for name in ONE_OF_EACH}
    assert len(layers) == len(ONE_OF_EACH) == len(READERS)


def test_a_run_is_a_table(printed, monkeypatch, tmp_path):
    """The table can be printed from its file; differences beyond rounding are reported."""
    monkeypatch.setattr(models, "FORMS", FORMS[:1])
    flags = "run.py models --model gpt-oss-20b --markdown"
    table = printed(flags, "--json", tmp_path / "rows.json")
    assert table.startswith("| on | x, h x weights | gpt-oss-20b | weights alone |\n")
    assert re.search(r"^\| Hopper \| bf16 x mxfp4 \| 0\.\d\d% \| 1\d% \|$", table, re.MULTILINE)
    assert printed("run.py models", "--show", tmp_path / "rows.json") == table
    row = {"kind": "layer", "model": "m", "error": 1.0, "weights": 0.0, "ok": False}
    _, (line,) = models.lines_of([row | vars(Form("sm_90a", "bf16", "mxfp4"))])
    assert line[2] == "100.00% OUT"


def test_the_table_of_the_readme_is_that_of_the_results(printed):
    readme = (ROOT / "moe" / "README.md").read_text(encoding="utf-8")
    assert printed("run.py models", "--show", RESULTS).strip() in readme
