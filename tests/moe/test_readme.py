"""moe/README.md tells the truth: its example runs and is right."""

from __future__ import annotations

import re

import pytest
import torch

from moe import reference, reference_routing
from tests.house.source import ROOT

README = (ROOT / "moe" / "README.md").read_text(encoding="utf-8")


@pytest.mark.matrix
def test_the_example_runs_and_is_right():
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict = {}
    torch.manual_seed(0)
    exec(program, names)
    routed = reference_routing.route(names["logits"], 2)
    weights = (names[name].bfloat16() for name in ("w13", "w2"))
    exact = reference.layer(names["x"], *weights, routed, limit=10.0)
    error = (names["y"].double() - exact).norm() / exact.norm()
    assert error < 0.3  # of random numbers in four bits; the definition with them has 0.24


def test_files_that_it_names_exist():
    for name in re.findall(r"`([a-z0-9_/]+\.py|[a-z0-9_]+/)`", README):
        assert (ROOT / "moe" / name).exists(), name
