"""blackwell_engines/README.md tells the truth: its examples run, and what it names is there."""

from __future__ import annotations

import re

import pytest
import torch

from lab.house.source import ROOT

pytest.importorskip("transformers", reason="transformers is not installed")

from tests.blackwell_engines.transformers import models  # only with transformers

README = (ROOT / "blackwell_engines" / "README.md").read_text(encoding="utf-8")
ATTENTION, EXPERTS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_examples_run():
    names: dict = {}
    torch.manual_seed(0)
    exec(ATTENTION, names)
    model, ids = names["model"], names["ids"]
    model.set_attn_implementation("eager")
    given = {"attention_mask": names["mask"], "max_new_tokens": 3, "do_sample": False}
    assert torch.equal(names["tokens"], model.generate(ids, **given))
    exec(EXPERTS, names)
    assert "blackwell_experts" in repr(names["mixture"])


def test_models_that_it_names_are_tested():
    (named,) = re.findall(r"random weights: (.*?)\.\n", README, re.DOTALL)
    flat = re.sub(r"\W+", "", re.sub(r"(\w+) 2 and 3", r"\g<1>2 \g<1>3", named)).lower()
    for name in models.MODELS | models.MIXTURES:
        assert name.replace("-", "") in flat


def test_files_that_it_names_exist():
    for name in re.findall(r"`(transformers/\w+\.py)`", README):
        assert (ROOT / "blackwell_engines" / name).exists()
