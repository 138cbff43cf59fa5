"""The READMEs of vLLM's and SGLang's backends tell the truth: their examples run, and what they
name is there."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from fmha.reference import definition, rounded
from kernelkit.numerics.tolerance import compare_output
from lab.house.source import ROOT

ENGINES = {"vllm": "0.33.0", "sglang": "0.5.23"}


def text_of(engine: str) -> str:
    return (ROOT / "blackwell_engines" / engine / "README.md").read_text(encoding="utf-8")


def run(engine: str) -> dict[str, Any]:
    """The names of its example."""
    (example,) = re.findall(r"```python\n(.*?)```", text_of(engine), re.DOTALL)
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(example, names)
    return names


def judge(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    given = q[None], k[None], v[None]
    exact, near = (of(*given, causal=True).o[0] for of in (definition, rounded))
    report = compare_output(out, exact, near, torch.bfloat16)
    assert report.ok, str(report)


def check_vllm() -> None:
    names = run("vllm")
    out, q, before = names["out"], names["q"], names["before"]
    keys = [
        torch.cat((old, new[:1])) for old, new in zip(before, (names["k"], names["v"]), strict=True)
    ]
    judge(out[:1], q[:1], *keys)
    judge(out[1:], q[1:], names["k"][1:], names["v"][1:])


def check_sglang() -> None:
    names = run("sglang")
    slots = names["req_to_token"][1, :21].long()
    judge(names["out"], names["q"], *(buffer[slots] for buffer in names["buffers"]))


CHECKS = {"vllm": check_vllm, "sglang": check_sglang}


@pytest.mark.parametrize("engine", ENGINES)
def test_the_example_by_definition(engine, engines_by_definition):
    CHECKS[engine]()


@pytest.mark.parametrize("engine", ENGINES)
def test_the_example_runs(engine, poisoned_outputs):
    CHECKS[engine]()


@pytest.mark.parametrize("engine", ENGINES)
def test_what_it_names_is_there(engine):
    text, module = text_of(engine), __import__(f"blackwell_engines.{engine}", fromlist=["NAME"])
    assert f"--attention-backend {module.NAME}" in text
    assert ENGINES[engine] in text
    assert ENGINES[engine] in module.__doc__
    for name in re.findall(r"`(\w+\.py)`", text):
        assert (ROOT / "blackwell_engines" / engine / name).exists()
