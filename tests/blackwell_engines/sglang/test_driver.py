"""The plugin under a driver: steps of an engine, each request compared with the definition."""

from __future__ import annotations

import pytest
import torch

from kernelkit.call.launch import emulation
from tests.blackwell_engines import requests
from tests.blackwell_engines.requests import LayerShape, served
from tests.blackwell_engines.sglang.engine import Engine

SHAPES = requests.SHAPES | {
    "fp8": LayerShape(head_dim=128, kv_dtype=torch.float8_e4m3fn, scales=(0.5, 0.25)),
}


def serve(engine: Engine) -> None:
    """Run whole prompts and pieces, decoding, mixed batches, a shared prefix, a retraction."""
    engine.admit(1, 60)
    engine.admit(2, 40)
    engine.step({1: 20, 2: 17})
    engine.step({1: 1, 2: 1}, mode="DECODE")
    engine.step({2: 11, 1: 1}, mode="MIXED")
    if not engine.windowed:
        engine.admit(3, 60, prefix_of=1, prefix=16)
        engine.step({3: 9})
    engine.retract(2)
    engine.step({2: 33})
    engine.backend.init_cuda_graph_state(4, 4)
    engine.step({1: 1, 2: 1}, mode="DECODE", graph=True)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", SHAPES)
def test_by_definition(name, page_size, plugin, engines_by_definition):
    serve(Engine(plugin, SHAPES[name], page_size=page_size))
    names = {"attention", "decode"} | ({"gather"} if page_size == 1 else set())
    assert set(engines_by_definition) == names


@pytest.mark.parametrize("page_size", [1, 8])
def test_a_pool_of_its_own_for_layers_with_a_window(page_size, plugin, engines_by_definition):
    serve(Engine(plugin, SHAPES["gpt-oss"], page_size=page_size, windowed=True))


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("arch", "name"), served(SHAPES))
def test_kernels(name, page_size, arch, plugin, poisoned_outputs):
    with emulation(arch=arch):
        serve(Engine(plugin, SHAPES[name], page_size=page_size))


def test_new_keys_of_whole_prompts_are_not_read_from_the_pool(plugin, engines_by_definition):
    engine = Engine(plugin, SHAPES["plain"])
    engine.admit(1, 30)
    engine.step({1: 20})
    assert engines_by_definition == ["attention"]
    engine.step({1: 4})
    assert engines_by_definition[1:] == ["gather", "attention"]
