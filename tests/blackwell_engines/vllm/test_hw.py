"""On a GPU: the driver's steps, and a captured step that is replayed with new contents from the
engine.

`python -m pytest --hw -m hw tests/blackwell_engines/vllm/test_hw.py`
"""

from __future__ import annotations

import pytest
import torch

from moe import SwiGLU
from tests.blackwell_engines import experts
from tests.blackwell_engines.requests import next_tokens, replay_captured
from tests.blackwell_engines.vllm import moe_engine, test_experts
from tests.blackwell_engines.vllm.engine import STRIDES, Engine
from tests.blackwell_engines.vllm.test_driver import SHAPES, serve

pytestmark = [pytest.mark.hw, pytest.mark.usefixtures("poisoned_outputs")]
PADDED = 4  # requests of the captured batch


@pytest.mark.parametrize("layout", STRIDES)
@pytest.mark.parametrize("name", SHAPES)
def test_steps(name, layout, plugin):
    serve(Engine(plugin, SHAPES[name], layout=layout, device="cuda"))


@pytest.mark.parametrize("name", SHAPES)
def test_a_captured_step(name, plugin):
    """Two requests in a batch of four: lengths, tables and slots change in place."""
    engine, plan = Engine(plugin, SHAPES[name], device="cuda"), {1: 1, 2: 1}
    for request, length in ((1, 60), (2, 60)):
        engine.admit(request, length)
    engine.step({1: 14, 2: 30})
    common, order = engine.metadata(plan, PADDED)
    step, static = engine.builder.build_for_cudagraph_capture(common), next_tokens(order, PADDED)
    out = torch.empty_like(static[0])

    def run() -> torch.Tensor:
        cache = engine.cache
        engine.impl.do_kv_cache_update(engine.layer, *static[1:], cache, common.slot_mapping)
        return engine.impl.forward(engine.layer, *static, cache, step, out)

    replay_captured(
        run, order, static, common, lambda: engine.metadata(plan, PADDED)[0],
        ("seq_lens", "block_table_tensor", "slot_mapping"),
    )  # fmt: skip


@pytest.mark.parametrize("kind", experts.KINDS)
def test_experts_in_a_captured_step(kind):
    """A rank's experts: eager, then captured and replayed with other tokens and choices."""
    with moe_engine.imported():
        layer = test_experts.made(kind, test_experts.HERE, device="cuda")
    static = [x.cuda() for x in experts.tokens(5)]
    eager = layer(*static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(*static)
    for seed in (1, 2):
        given = experts.tokens(5, seed)
        for tensor, value in zip(static, given, strict=True):
            tensor.copy_(value)
        graph.replay()
        if seed == 1:
            assert torch.equal(out, eager)
        x, ids, weights = given
        ids = torch.where((ids == 1) | (ids == 2), ids, -1)
        form = test_experts.FORMS.get(kind, SwiGLU())
        wanted = experts.exact(experts.checkpoint(kind), x, ids, weights, form)
        assert (out.cpu().double() - wanted).norm() <= 0.01 * wanted.norm()
