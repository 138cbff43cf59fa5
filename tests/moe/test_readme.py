"""moe/README.md is true: its example runs and is right."""

from __future__ import annotations

import json
import re

import torch

from lab.house.source import ROOT
from moe import Router, pack_gpt_oss, reference, reference_routing, unpack, unpack_biases
from tests.moe.hub_files import gpt_oss, write

README = (ROOT / "moe" / "README.md").read_text(encoding="utf-8")


def test_the_example_runs_and_is_right():
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict = {}
    torch.manual_seed(0)
    exec(program, names)
    routed = reference_routing.route(names["logits"], 2)
    weights = (names[name].bfloat16() for name in ("w13", "w2"))
    exact = reference.layer(names["x"], *weights, routed, limit=10.0)
    error = (names["y"].double() - exact).norm() / exact.norm()
    assert error < 0.3  # for random numbers in four bits; the definition with them has 0.24


def test_the_example_of_hopper_runs_and_is_right(tmp_path):
    """Files of a checkpoint with the same names, and smaller experts."""
    page = (ROOT / "docs" / "moe_hopper.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    tensors = gpt_oss(6, 192, 128)
    folder, names = write(tmp_path, tensors), {}
    exec(program.replace('"gpt-oss-20b", "model', f'"{folder}", "model'), names)
    packed = pack_gpt_oss(folder, f"{names['layer']}.experts")
    routed = reference_routing.route(names["logits"].cpu(), **on_cpu(names["router"]))
    given = {"biases": unpack_biases(packed), **vars(names["model"].activation)}
    exact = reference.layer(names["x"].cpu(), *unpack(packed), routed, **given)
    assert (names["y"].cpu().double() - exact).norm() / exact.norm() < 0.01


def on_cpu(router: Router) -> dict:
    """Keywords of `route`."""
    return {**vars(router), "logit_bias": router.logit_bias.cpu()}


def test_files_that_it_names_exist():
    for name in re.findall(r"`([a-z0-9_/]+\.py|[a-z0-9_]+/)`", README):
        assert (ROOT / "moe" / name).exists(), name


def test_the_table_of_steps_is_that_of_the_results(printed):
    (table,) = re.findall(r"^\| step \| 1 .*?\n\n", README, re.MULTILINE | re.DOTALL)
    names = "--markdown --names nvfp4 mxfp8 experts bf16".split()
    results = ROOT / "results" / "moe_h200.json"
    shown = printed("bench.py moe --show", results, *names)
    assert shown.strip() == table.strip()
    assert json.loads(results.read_text())[0]["date"] in README
