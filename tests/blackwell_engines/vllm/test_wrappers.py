"""Layers that are no plain decoders, for which vLLM derives from the plugin's classes, and steps
that are not causal. Each token is compared with the definition.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests.blackwell_engines.requests import SHAPES, LayerShape, Request
from tests.blackwell_engines.vllm.engine import (
    CAPABILITY,
    EncoderOnlyAttentionSpec,
    Engine,
    cache_of,
    config_of,
)
from tests.blackwell_engines.vllm.wrappers import CHUNK, chunked, crossing, encoding, sharing

PLAIN = SHAPES["plain"]


class Pieces(Request):
    """A request whose tokens see those of their own chunk alone."""

    def judge(self, out: torch.Tensor, first: int, **options: bool) -> None:
        for row, token in enumerate(range(first, first + len(out))):
            begin = token // CHUNK * CHUNK
            piece = Request(self.name, self.shape, self.length)
            piece.q, piece.k, piece.v = (x[begin:] for x in (self.q, self.k, self.v))
            Request.judge(piece, out[row : row + 1], token - begin, **options)


def test_layers_with_chunks(plugin, engines_by_definition):
    """As in Llama 4: the batch has other requests than the engine's."""
    engine = Engine(plugin, PLAIN, builder=chunked)
    for name in (1, 2):
        engine.requests[name] = Pieces(name, PLAIN, 90)
    engine.step({1: 20})
    engine.step({1: 1, 2: 70})
    engine.step({1: 1, 2: 1})
    step = engine.step({1: 14, 2: 1})
    assert step.make_virtual_batches_block_table(step.table) is step.table


def test_layers_that_share_keys(plugin, engines_by_definition):
    """Only the last token of each prompt passes them, and its keys are another layer's."""
    engine = Engine(plugin, PLAIN)
    for name in (1, 2):
        engine.admit(name, 60)
    last = {}
    forward = engine.impl.forward

    def keep(layer, q, k, v, cache, step, out):
        given = forward(layer, q, k, v, cache, step, out)
        last["q"], last["cache"] = q, cache
        return given

    engine.impl.forward = keep
    plan = {1: 20, 2: 33}
    common, order = engine.metadata(plan)
    engine.step(plan)
    backend = plugin.BlackwellKernelsBackend
    builder = sharing(backend.get_builder_cls())(
        engine.builder.kv_cache_spec, ["layer"], config_of(fast_prefill=True), None
    )
    step = builder.build(0, common)
    assert (step.requests, step.tokens, step.rest, step.num_logits_indices) == (2, 1, 0, 2)
    q = last["q"][[19, 52]]
    out = torch.empty_like(q)
    forward(engine.layer, q, None, None, last["cache"], step, out)
    for row, request in enumerate(order):
        request.judge(out[row : row + 1], request.done - 1)


class _OnGpu(torch.Tensor):
    is_cuda = True


@pytest.mark.parametrize("fast_prefill", [False, True])
def test_starts_that_may_still_be_on_their_way(fast_prefill, plugin, monkeypatch):
    """With fast prefill vLLM copies them from the GPU and does not wait."""
    engine, waits = Engine(plugin, PLAIN), []
    stream = SimpleNamespace(synchronize=lambda: waits.append(True))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    given = engine.builder.kv_cache_spec, ["layer"], config_of(fast_prefill=fast_prefill), None
    builder = plugin.BlackwellKernelsBuilder(*given)
    engine.admit(1, 20)
    common, _ = engine.metadata({1: 9})
    common.query_start_loc = common.query_start_loc.as_subclass(_OnGpu)
    builder.build(0, common)
    assert len(waits) == fast_prefill


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("kind", ["encoder", "encoder_only"])
def test_encoders(kind, window, plugin, engines_by_definition):
    """Encoders have no cache; a window is as wide behind a token as before it."""
    shape = LayerShape(window=window)
    width = None if window is None else window + 1
    impl = plugin.BlackwellKernelsImpl(4, 64, 64**-0.5, 2, None, width, "auto", None, kind)
    builder = encoding(plugin.BlackwellKernelsBuilder)
    spec, engine = EncoderOnlyAttentionSpec(block_size=16), Engine(plugin, shape)
    assert builder.get_cudagraph_support(None, spec).name == "NEVER"
    order = [Request(name, shape, length) for name, length in ((1, 1), (2, 40), (3, 17))]
    engine.requests = {request.name: request for request in order}
    common, _ = engine.metadata({1: 1, 2: 40, 3: 17})
    common.block_table_tensor, none = torch.zeros(3, 1).int(), torch.tensor([])
    step = builder(spec, ["layer"], config_of(), None).build(0, common)
    q, k, v = (torch.cat([getattr(request, name) for request in order]) for name in "qkv")
    out = torch.full_like(q, 777.0)
    impl.do_kv_cache_update(engine.layer, k, v, torch.ones(3, 2, 16, 128), common.slot_mapping)
    impl.forward(engine.layer, q, k, v, none, step, out)
    first = 0
    for request in order:
        request.judge(out[first : first + request.length], 0, causal=False)
        first += request.length
    assert engines_by_definition == ["attention"]


def test_decoders_over_the_keys_of_an_encoder(plugin, engines_by_definition):
    """As many keys as the encoder has, whatever the number of tokens; written with the prompt."""
    keys, pages = [37, 20], [[3, 0, 5], [2, 4]]
    encoded = [Request(name, PLAIN, length) for name, length in zip((7, 8), keys, strict=True)]
    slots = torch.tensor([
        pages[entry][token // 16] * 16 + token % 16
        for entry, length in enumerate(keys)
        for token in range(length)
    ])  # fmt: skip
    engine = Engine(plugin, PLAIN)
    builder = crossing(plugin.BlackwellKernelsBuilder, keys, slots)
    made = builder(engine.builder.kv_cache_spec, ["layer"], config_of(), None)
    impl = plugin.BlackwellKernelsImpl(
        4, 64, 64**-0.5, 2, None, None, "auto", None, "encoder_decoder"
    )
    cache = cache_of(PLAIN, 6, 16, "LBNHC")
    for name in (1, 2):
        engine.admit(name, 60)
    for plan in ({1: 5, 2: 9}, {1: 1, 2: 1}):
        common, order = engine.metadata(plan)
        common.block_table_tensor = torch.tensor([[3, 0, 5], [2, 4, 0]]).int()
        step = made.build(0, common)
        if max(plan.values()) > 1:
            k, v = (torch.cat([getattr(request, x) for request in encoded]) for x in "kv")
            impl.do_kv_cache_update(engine.layer, k, v, cache, step.slot_mapping)
        q = torch.cat([r.q[r.done : r.done + plan[r.name]] for r in order])
        out = torch.empty_like(q)
        impl.forward(engine.layer, q, None, None, cache, step, out)
        first = 0
        for request, other in zip(order, encoded, strict=True):
            new = plan[request.name]
            judge = Request(0, PLAIN, other.length)
            judge.k, judge.v = other.k, other.v
            judge.q = request.q[request.done :].new_zeros(other.length, 4, 64)
            judge.q[-new:] = request.q[request.done : request.done + new]
            judge.judge(out[first : first + new], other.length - new, causal=False)
            request.done, first = request.done + new, first + new
    assert engines_by_definition == ["append", "attention", "decode"]


@pytest.mark.parametrize(
    ("window", "tokens", "kernel"),
    [(None, 4, "decode"), (9, 4, "decode"), (3, 4, "decode"), (2, 4, "attention"),
     (None, 9, "attention"), (5, 9, "attention")],
)  # fmt: skip
def test_blocks_of_drafts(window, tokens, kernel, plugin, engines_by_definition):
    """All tokens of a block see one another, as far as the window goes on both sides."""
    engine = Engine(plugin, LayerShape(window=window), drafts=tokens - 1)
    for name in (1, 2):
        engine.admit(name, 80)
    engine.step({1: 9, 2: 40})
    engine.step({1: tokens, 2: tokens}, causal=False)
    assert engines_by_definition[-1] == kernel
    assert engine.step({1: 1, 2: 13}, causal=False).causal is False


def test_steps_keep_what_vllm_adds_when_they_are_captured(plugin):
    engine = Engine(plugin, PLAIN, builder=partial(crossing, keys=[5], slots=torch.arange(5)))
    engine.admit(1, 10)
    common, _ = engine.metadata({1: 1})
    step = engine.builder.build_for_cudagraph_capture(common)
    assert step.slot_mapping.tolist() == [0, 1, 2, 3, 4]
    assert step.bound > 5
    assert not step.causal


def test_a_scale_for_each_head(plugin, engines_by_definition):
    shape = LayerShape(kv_dtype=torch.float8_e4m3fn, scales=((0.5, 2.0), (0.25, 1.0)))
    engine = Engine(plugin, shape)
    engine.admit(1, 60)
    engine.step({1: 40})
    engine.step({1: 1})
    assert engines_by_definition == ["append", "append", "attention"] + ["append"] * 2 + ["decode"]


def test_a_head_without_a_scale_is_refused(plugin):
    engine = Engine(plugin, LayerShape(kv_dtype=torch.float8_e4m3fn, scales=((0.5, -1.0), 1.0)))
    with pytest.raises(ValueError, match=r"k_scale is -1\.0"):
        engine.impl._scores_of(engine.layer, torch.empty(0, dtype=torch.float8_e4m3fn))


@pytest.mark.parametrize("name", ["plain", "fp8"])
def test_blocks_that_lie_apart(name, plugin, engines_by_definition):
    """Hybrid models pad a block to the size of another layer's."""
    engine = Engine(plugin, SHAPES[name], padding=48)
    engine.admit(1, 60)
    engine.step({1: 40})
    engine.step({1: 1})


def test_o_in_e4m3(plugin, engines_by_definition):
    """vLLM may have O in e4m3 of the kernels themselves, divided by a scale."""
    engine = Engine(plugin, PLAIN)
    for name in (1, 2):
        engine.admit(name, 60)
    engine.step({1: 20})
    common, order = engine.metadata({1: 1, 2: 17})
    first, second = order
    q, k, v = (torch.cat([getattr(first, x)[20:21], getattr(second, x)[:17]]) for x in "qkv")
    engine.impl.do_kv_cache_update(engine.layer, k, v, engine.cache, common.slot_mapping)
    given = engine.layer, q, k, v, engine.cache, engine.builder.build(0, common)
    o = engine.impl.forward(*given, torch.empty_like(q)).float()
    narrow, scale = torch.empty_like(q, dtype=torch.float8_e4m3fn), torch.tensor([0.25])
    engine.impl.forward(*given, narrow, scale)
    assert ((narrow.float() * 0.25 - o).abs() <= 2**-4 * o.abs() + 2**-11).all()
    with pytest.raises(NotImplementedError, match="output_block_scale: O in e4m3 has one scale"):
        engine.impl.forward(*given, narrow, scale, torch.ones(1))


def test_where_o_in_e4m3_is_offered(plugin, monkeypatch):
    key, impl = plugin.kFp8StaticTensorSym, Engine(plugin, PLAIN).impl
    assert impl.fused_output_quant_supported(key)
    assert not impl.fused_output_quant_supported("another")
    monkeypatch.setattr(impl, "dcp_world_size", 2)
    assert not impl.fused_output_quant_supported(key)
    monkeypatch.undo()
    monkeypatch.setattr(CAPABILITY, "major", 8)
    assert not impl.fused_output_quant_supported(key)
