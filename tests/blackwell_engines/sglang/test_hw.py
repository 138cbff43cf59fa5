"""On a GPU: the driver's steps, and a captured step that fills its own tables.

`python -m pytest --hw -m hw tests/blackwell_engines/sglang/test_hw.py`
"""

from __future__ import annotations

import pytest
import torch

from tests.blackwell_engines.requests import next_tokens, replay_captured
from tests.blackwell_engines.sglang.engine import Engine, ForwardMode
from tests.blackwell_engines.sglang.test_driver import SHAPES, serve
from tests.blackwell_engines.sglang.test_kinds import (
    ANCESTORS,
    advance_in_chunks,
    prepared,
    tree,
    verify,
)

pytestmark = [pytest.mark.hw, pytest.mark.usefixtures("poisoned_outputs")]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", SHAPES)
def test_steps(name, page_size, plugin):
    serve(Engine(plugin, SHAPES[name], page_size=page_size, device="cuda"))


@pytest.mark.parametrize("page_size", [1, 8])
def test_a_pool_of_its_own_for_layers_with_a_window(page_size, plugin):
    serve(Engine(plugin, SHAPES["gpt-oss"], page_size=page_size, windowed=True, device="cuda"))


@pytest.mark.parametrize("page_size", [1, 16])
def test_drafts(page_size, plugin):
    engine = prepared(Engine(plugin, SHAPES["plain"], page_size=page_size, device="cuda"))
    if page_size == 1:
        drafts = tree([20, 17], True)
        drafts.custom_mask = drafts.custom_mask.cuda()
        engine.step({1: 6, 2: 6}, mode="TARGET_VERIFY", spec_info=drafts, ancestors=ANCESTORS)
    verify(engine, 4)


@pytest.mark.parametrize("page_size", [1, 8])
def test_chunks_of_positions(page_size, plugin):
    engine = Engine(plugin, SHAPES["plain"], page_size=page_size, chunk=8, device="cuda")
    advance_in_chunks(engine)


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_captured_step(page_size, plugin):
    engine, plan = Engine(plugin, SHAPES["plain"], page_size=page_size, device="cuda"), {1: 1, 2: 1}
    for request, length in ((1, 60), (2, 60)):
        engine.admit(request, length)
    engine.step({1: 14, 2: 30})
    backend, (layer,) = engine.backend, engine.layers
    backend.init_cuda_graph_state(4, 4)
    order = [engine.requests[name] for name in plan]
    batch, static = engine.forward_batch(plan, ForwardMode.DECODE), next_tokens(order, len(order))
    backend.init_forward_metadata_out_graph(batch, in_capture=True)

    def run() -> torch.Tensor:
        backend.init_forward_metadata_in_graph(batch)
        return backend.forward(static[0].flatten(1), *static[1:], layer, batch)

    replay_captured(
        run, order, static, batch, lambda: engine.forward_batch(plan, ForwardMode.DECODE),
        ("seq_lens", "out_cache_loc", "req_pool_indices"),
    )  # fmt: skip
