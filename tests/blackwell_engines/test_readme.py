"""READMEs of this package are true: their examples run, and the names in them exist."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fmha import attention
from fmha.reference import definition, rounded
from kernelkit.numerics.tolerance import compare_output
from lab.house.source import ROOT

ENGINES = {"vllm": "0.33.0", "sglang": "0.5.23"}


def text_of(folder: str) -> str:
    return (ROOT / "blackwell_engines" / folder / "README.md").read_text(encoding="utf-8")


def examples_of(folder: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text_of(folder), re.DOTALL)


def run(folder: str) -> dict[str, Any]:
    """Run a README's example and return its names."""
    (example,) = examples_of(folder)
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


def test_the_example_of_the_ring_runs():
    try:
        names = run("parallel")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    q, k, v, whole = (names[name] for name in ("q", "k", "v", "whole"))
    assert torch.equal(whole, attention(q, k, v, causal=True))
    assert names["positions"].tolist() == list(range(40))


def test_the_examples_of_models_run():
    pytest.importorskip("transformers", reason="transformers is not installed")
    first, second = examples_of("")
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(first, names)
    model, ids = names["model"], names["ids"]
    model.set_attn_implementation("eager")
    given = {"attention_mask": names["mask"], "max_new_tokens": 3, "do_sample": False}
    assert torch.equal(names["tokens"], model.generate(ids, **given))
    exec(second, names)
    assert "blackwell_experts" in repr(names["mixture"])


def test_models_that_it_names_are_tested():
    pytest.importorskip("transformers", reason="transformers is not installed")
    from tests.blackwell_engines.transformers import models

    (named,) = re.findall(r"random weights: (.*?)\.\n", text_of(""), re.DOTALL)
    flat = re.sub(r"\W+", "", re.sub(r"(\w+) 2 and 3", r"\g<1>2 \g<1>3", named)).lower()
    for name in models.MODELS | models.MIXTURES:
        assert name.replace("-", "") in flat


def test_files_that_it_names_exist():
    for name in re.findall(r"`(transformers/\w+\.py)`", text_of("")):
        assert (ROOT / "blackwell_engines" / name).exists()
