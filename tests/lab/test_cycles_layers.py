"""`cycles.py layers`: the layers that it models, its comparisons, and one of the layers."""

from __future__ import annotations

import json

import pytest

from cycle_model.sass.tools import HOW_TO_GET_TOOLS, tools_found
from lab.commands import CYCLES
from lab.cycles.layers import STEPS, Problem, problems_of, rivals
from lab.flags.moe import MODEL_NAMES, MODEL_TOKENS
from lab.problems.moe import blank
from moe.models import CONFIGS, of_model
from scripts import cycles

FLAGS = ("--model", "gpt-oss-20b", "--tokens", "1", "--clusters", "1", "--perturbed", "1")


def parsed(*words: str) -> list[Problem]:
    return problems_of(CYCLES["layers"].parser("cycles.py layers").parse_args(words))


def test_every_row_of_the_rivals_is_a_layer_that_can_be_asked_for():
    for name, formats, routing, tokens in rivals():
        activations, weights = formats.split(" x ")
        assert name in CONFIGS
        if activations == "bf16":
            continue  # a form for arranged experts
        words = ("--activations", activations, "--format", weights, "--routing", routing)
        (problem,) = parsed("--model", name, "--tokens", str(tokens), *words)
        assert (problem.name, problem.formats) == (name, formats)


def test_layers_have_the_formats_in_which_rivals_have_them():
    found = {problem.name: problem.formats for problem in parsed("--model", *MODEL_NAMES)}
    assert found["gpt-oss-120b"] == found["deepseek-v4-pro"] == "mxfp8 x mxfp4"
    assert found["deepseek-v3"] == "nvfp4 x nvfp4"
    assert len(parsed()) == 2 * len(MODEL_TOKENS)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "mxfp8"])
def test_zeros_are_matrices_of_their_format(fmt):
    w = blank((3, 130, 256), fmt, 3, 3, "cpu")
    assert (w.rows, w.k, len(w.data)) == (130, 256, 3)
    x = blank((40, 256), fmt, 3, 1, "cpu")
    assert (x.rows, x.k) == (40, 256)


def test_a_layer_goes_where_the_reference_sends_its_tokens():
    layer, routed = Problem(
        "gpt-oss-20b", of_model("gpt-oss-20b"), "mxfp8", "mxfp4", 8, "balanced"
    ).made()
    assert layer.fmt == "mxfp8"
    assert routed.offsets.diff().tolist() == [1] * 32  # 8 tokens, 4 experts each


@pytest.mark.skipif(not tools_found(), reason=HOW_TO_GET_TOOLS)
@pytest.mark.usefixtures("whole_ptxas")
def test_a_layer_is_the_sum_of_its_steps(capsys, tmp_path):
    file = tmp_path / "layers.json"
    assert cycles.main(["layers", *FLAGS, "--json", str(file)]) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert row["us"] == pytest.approx(sum(row[step] for step in STEPS))
    assert all(row[step] > 0 for step in STEPS)
    assert row["low_us"] <= row["us"] <= row["high_us"]
    assert "modelled, not measured" in capsys.readouterr().out
