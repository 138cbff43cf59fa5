"""The plugin under a driver: steps of an engine, each request compared with the definition."""

from __future__ import annotations

import pytest
import torch

from kernelkit.call.launch import emulation
from tests.blackwell_engines import requests
from tests.blackwell_engines.requests import LayerShape, served
from tests.blackwell_engines.vllm.engine import STRIDES, Engine

SHAPES = requests.SHAPES | {"head-dim-96": LayerShape(head_dim=96)}


def serve(engine: Engine) -> None:
    """Run pieces of prompts, decoding, both in a step, a preemption, and a request that comes
    late.
    """
    for name, length in ((1, 60), (2, 40), (3, 90)):
        engine.admit(name, length)
    engine.step({1: 20})
    engine.step({1: 1, 2: 33})
    engine.step({1: 1, 2: 1, 3: 50})
    engine.preempt(1)
    engine.step({2: 1, 3: 17})
    engine.step({3: 1, 2: 1, 1: 23})
    engine.step({1: 1, 2: 1, 3: 1})


def drafts(engine: Engine) -> None:
    """Run drafts of several lengths, alike and not, and blocks of them, which are not causal."""
    for name in (1, 2):
        engine.admit(name, 60)
    engine.step({1: 9, 2: 20})
    for plan in ({1: 3, 2: 3}, {1: 2, 2: 2}, {1: 3, 2: 2}):
        for causal in (True, False):
            engine.step(plan, causal=causal)


@pytest.mark.parametrize("layout", STRIDES)
@pytest.mark.parametrize("name", SHAPES)
def test_by_definition(name, layout, plugin, engines_by_definition):
    serve(Engine(plugin, SHAPES[name], layout=layout))
    names = {"append", "attention"} | ({"decode"} if name != "head-dim-96" else set())
    assert set(engines_by_definition) == names


@pytest.mark.parametrize(("arch", "name"), served(SHAPES))
def test_kernels(name, arch, plugin, poisoned_outputs):
    with emulation(arch=arch):
        serve(Engine(plugin, SHAPES[name], layout="LBHNC" if arch == "sm_90a" else "LBNHC"))


@pytest.mark.parametrize(("arch", "window"), [("sm_100a", 9), ("sm_90a", None), ("sm_89", 1)])
def test_kernels_of_drafts(arch, window, plugin, poisoned_outputs):
    with emulation(arch=arch):
        drafts(Engine(plugin, LayerShape(window=window), drafts=2))


def test_kernels_of_scales_per_head(plugin, poisoned_outputs):
    scales = (0.5, 2.0), (0.25, 1.0)
    with emulation(arch="sm_90a"):
        serve(Engine(plugin, LayerShape(kv_dtype=torch.float8_e4m3fn, scales=scales)))


def test_drafts_are_decoded_together(plugin, engines_by_definition):
    engine = Engine(plugin, SHAPES["plain"], drafts=2)
    for name in (1, 2, 3):
        engine.admit(name, 60)
    engine.step({1: 9, 2: 20})
    engine.step({1: 3, 2: 3, 3: 11})
    engine.step({1: 3, 2: 3, 3: 2})
    assert engines_by_definition[-2:] == ["decode", "attention"]


def test_rows_of_padding_of_a_graph(plugin, engines_by_definition):
    """A captured batch of four has two requests: the other rows read and write nothing."""
    engine = Engine(plugin, SHAPES["plain"])
    for name in (1, 2):
        engine.admit(name, 60)
    engine.step({1: 9, 2: 20})
    engine.step({1: 1, 2: 1}, padded_requests=4)
    assert engines_by_definition[-2:] == ["append", "decode"]
