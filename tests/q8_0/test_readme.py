"""q8_0/README.md is true: its example runs, the names in it exist."""

from __future__ import annotations

import re

import torch

import q8_0
from lab.house.source import ROOT
from q8_0 import reference

README = (ROOT / "q8_0" / "README.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_example_runs_and_is_right():
    names: dict = {}
    torch.manual_seed(0)
    exec(PROGRAMS[0], names)
    arrays, x, exact = names["arrays"], names["x"], reference.matvec(names["blocks"], names["x"])
    assert torch.equal(names["y"], names["same"])
    assert torch.equal(names["z"], names["y"])
    top = exact.abs().max()
    assert (names["y"].double() - exact).abs().max() < top * 2.0**-8
    assert 0 < (names["by_integers"].double() - exact).abs().max() < top * 0.02
    assert torch.equal(names["w"], reference.dequantise(arrays, torch.bfloat16))
    assert x.shape == (3, 128)


def test_the_example_of_a_file_asks_for_what_there_is(monkeypatch):
    asked = []

    class File:
        def __init__(self, path):
            asked.append(path)

    monkeypatch.setattr(q8_0, "GgufFile", File)
    given = lambda file, name, device: asked.append((name, device))  # noqa: E731
    monkeypatch.setattr(q8_0.Q8Linear, "from_gguf", given)
    exec(PROGRAMS[1], {})
    assert asked == ["model.gguf", ("blk.0.ffn_up.weight", "cuda")]


def test_files_that_it_names_exist():
    named = re.findall(r"`([a-z0-9_]+\.py)`", README)
    assert len(named) > 8
    for name in named:
        assert (ROOT / "q8_0" / name).exists(), name


def test_calls_that_it_names_exist():
    for name in re.findall(r"^\| `(\w+)`", README, re.MULTILINE):
        assert hasattr(q8_0, name), name
