"""Batches and layers beyond prompts and decoding: drafts, encoders, chunks of positions, shared
keys.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blackwell_engines.sglang import NAME, with_drafts
from blackwell_engines.sglang.tokens import Tokens, pieces_of, tree_of, tree_rows
from kernelkit.call.launch import emulation
from tests.blackwell_engines.requests import LayerShape
from tests.blackwell_engines.sglang.engine import Engine, ForwardMode, layer_of
from tests.blackwell_engines.sglang.test_driver import SHAPES

# Drafts of a request as an n-gram proposer brings them: a chain, a branch, a node of padding.
ANCESTORS = [[0], [0, 1], [0, 1, 2], [0, 3], [0, 3, 4], [0, 5]]
ENCODER = {"attn_type": SimpleNamespace(value="encoder_only")}


def chain(number: int) -> SimpleNamespace:
    """What EAGLE with one candidate a step brings; a mask that nobody has to read."""
    return SimpleNamespace(draft_token_num=number, topk=1, custom_mask=None)


def tree(lengths: list[int], whole: bool) -> SimpleNamespace:
    """Drafts of `ANCESTORS` for each request; the mask is over all keys, or over drafts alone."""
    number, parts = len(ANCESTORS), []
    for length in lengths:
        mask = torch.zeros(number, number, dtype=torch.bool)
        for draft, seen in enumerate(ANCESTORS):
            mask[draft, seen] = True
        parts.append(torch.cat([torch.ones(number, length * whole).bool(), mask], 1).flatten())
    return SimpleNamespace(draft_token_num=number, custom_mask=torch.cat(parts))


def prepared(engine: Engine) -> Engine:
    """An engine with two requests that have a prefix in the pool."""
    engine.admit(1, 60)
    engine.admit(2, 60)
    engine.step({1: 20, 2: 17})
    engine.backend.init_cuda_graph_state(4, 16)
    return engine


def verify(engine: Engine, number: int) -> None:
    """Verify chains in a step and, if a decode takes them, in one of a graph; extend by them."""
    for graph in (False, True)[: 2 if number <= 8 else 1]:
        plan = {1: number, 2: number}
        engine.step(plan, mode="TARGET_VERIFY", spec_info=chain(number), graph=graph)
    engine.step({1: number, 2: number}, mode="DRAFT_EXTEND_V2")


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", ["plain", "gemma", "fp8"])
@pytest.mark.parametrize("number", [4, 9])
def test_chains_of_drafts(number, name, page_size, plugin, engines_by_definition):
    verify(prepared(Engine(plugin, SHAPES[name], page_size=page_size)), number)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("name", ["plain", "gemma"])
def test_branches_of_drafts(name, whole, plugin, engines_by_definition):
    engine = prepared(Engine(plugin, SHAPES[name]))
    plan, spec_info = {1: 6, 2: 6}, tree([20, 17], whole)
    engine.step(plan, mode="TARGET_VERIFY", spec_info=spec_info, ancestors=ANCESTORS)
    assert engines_by_definition[-1] == "decode"


def test_drafts_with_a_pool_for_windows(plugin, engines_by_definition):
    engine = prepared(Engine(plugin, SHAPES["gpt-oss"], windowed=True))
    spec_info = tree([20, 17], True)
    engine.step({1: 6, 2: 6}, mode="TARGET_VERIFY", spec_info=spec_info, ancestors=ANCESTORS)
    engine = prepared(Engine(plugin, SHAPES["gpt-oss"], page_size=8, windowed=True))
    verify(engine, 4)


def test_drafts_by_kernels(plugin, poisoned_outputs):
    with emulation(arch="sm_90a"):
        engine = prepared(Engine(plugin, SHAPES["plain"]))
        spec_info = tree([20, 17], False)
        engine.step({1: 6, 2: 6}, mode="TARGET_VERIFY", spec_info=spec_info, ancestors=ANCESTORS)
        engine.step({1: 4, 2: 4}, mode="TARGET_VERIFY", spec_info=chain(4))


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_chain_of_a_draft_model(page_size, graph, plugin, engines_by_definition, monkeypatch):
    """Step n of a chain sees n + 1 keys more than the batch counts."""
    monkeypatch.delitem(sys.modules, "blackwell_engines.sglang.drafts", raising=False)
    engine = prepared(Engine(plugin, LayerShape(), page_size=page_size))
    factory = SimpleNamespace(draft_model_runner=engine.runner, topk=1, speculative_num_steps=4)

    def made(**named: bool) -> Any:
        own = with_drafts(lambda *given, **_: given[2][NAME](), factory, "", {}, "", **named)
        assert own[0] == NAME
        return own[1]

    assert type(made()) is plugin.BlackwellKernelsBackend
    backends = made(stamps_children=True)
    assert [backend.ahead for backend in backends.attn_backends] == [1, 2, 3]
    backends.init_cuda_graph_state(4, 16)
    batch = engine.forward_batch({1: 3, 2: 3}, ForwardMode.DECODE, SimpleNamespace())
    slots = batch.out_cache_loc.view(2, 3)
    batch.seq_lens = batch.seq_lens_cpu = torch.tensor([20, 17])
    if graph:
        backends.init_forward_metadata_out_graph(batch)
        backends.init_forward_metadata_in_graph(batch)
    else:
        backends.init_forward_metadata(batch)
    order = [engine.requests[1], engine.requests[2]]
    for step, backend in enumerate(backends.attn_backends):
        batch.out_cache_loc = slots[:, step]
        q, k, v = (torch.stack([getattr(r, x)[r.done + step] for r in order]) for x in "qkv")
        out = backend.forward(q.flatten(1), k, v, engine.layers[0], batch).unflatten(1, (4, -1))
        for row, request in enumerate(order):
            request.judge(out[row : row + 1], request.done + step)
    factory.topk = 2
    with pytest.raises(NotImplementedError, match="2 branches of a draft model"):
        made(stamps_children=True)


def test_trees():
    mask, table = tree([2, 1], True).custom_mask, torch.arange(18, dtype=torch.int32).view(2, 9)
    lengths = torch.tensor([2, 1])
    found = tree_of(mask, lengths, 6)
    assert torch.equal(found, tree_of(tree([2, 1], False).custom_mask, lengths, 6))
    rows, keys = tree_rows(table, lengths, found)
    assert keys.tolist() == [3, 4, 5, 4, 5, 4, 2, 3, 4, 3, 4, 3]
    assert rows[4, :5].tolist() == [0, 1, 2, 5, 6]
    assert rows[11, :3].tolist() == [9, 10, 15]
    assert table.tolist() == torch.arange(18).view(2, 9).tolist()


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("shape", [LayerShape(), LayerShape(window=5)])
def test_encoders(shape, page_size, plugin, engines_by_definition):
    engine = Engine(plugin, shape, page_size=page_size)
    engine.layers = [layer_of(shape, **ENCODER)]
    engine.admit(1, 30)
    engine.admit(2, 30)
    engine.step({1: 20, 2: 17})
    with pytest.raises(NotImplementedError, match="an encoder reads its own keys of a whole"):
        engine.step({1: 4})


def test_cross_attention(plugin, engines_by_definition):
    """Slots of a request begin with those of its encoder, whose keys each token of it sees."""
    engine = Engine(plugin, LayerShape())
    lengths = {1: 11, 2: 5}
    for name, length in lengths.items():
        engine.admit(name, length + 9)  # the first tokens are those of the encoder
        engine._allocate(engine.requests[name], length + 9)
    order = [engine.requests[name] for name in lengths]
    cross, layer = layer_of(LayerShape(), is_cross_attention=True), engine.layers[0]
    encoded = [slice(0, length) for length in lengths.values()]
    for new in (slice(0, 4), slice(4, 7), slice(7, 8)):  # of the decoder
        done, count = new.start, new.stop - new.start
        parts = [slice(n + new.start, n + new.stop) for n in lengths.values()]
        slots = [
            [engine.req_to_token[r.name, part].long() for r, part in zip(order, some, strict=True)]
            for some in (parts, encoded)
        ]
        batch = SimpleNamespace(
            forward_mode=ForwardMode.DECODE if count == 1 else ForwardMode.EXTEND, batch_size=2,
            spec_info=None, out_cache_loc=torch.cat(slots[0]),
            seq_lens=torch.tensor([new.stop] * 2),
            req_pool_indices=torch.tensor([1, 2]), seq_lens_cpu=torch.tensor([new.stop] * 2),
            extend_seq_lens=torch.tensor([count] * 2), extend_seq_lens_cpu=[count] * 2,
            encoder_lens=torch.tensor([11, 5]), encoder_lens_cpu=[11, 5],
            encoder_out_cache_loc=torch.cat(slots[1]),
        )  # fmt: skip
        engine.backend.init_forward_metadata(batch)
        q, k, v = (
            torch.cat([getattr(r, x)[p] for r, p in zip(order, parts, strict=True)]) for x in "qkv"
        )
        keys = [torch.cat([getattr(r, x)[p] for r, p in zip(order, encoded, strict=True)])
                for x in "kv"] if done == 0 else (None, None)  # fmt: skip
        outs = (
            engine.backend.forward(q.flatten(1), *keys, cross, batch),
            engine.backend.forward(q.flatten(1), k, v, layer, batch),
        )
        for row, (request, length) in enumerate(zip(order, lengths.values(), strict=True)):
            seen, own = (out[row * count : (row + 1) * count] for out in outs)
            alone = replace(request)
            alone.q, alone.k, alone.v = (getattr(request, x)[length:] for x in "qkv")
            alone.judge(own.unflatten(1, (4, -1)), done)
            alone.q = torch.zeros_like(request.q)
            alone.q[length - count : length] = request.q[parts[row]]
            alone.k, alone.v = request.k[:length], request.v[:length]
            alone.judge(seen.unflatten(1, (4, -1)), length - count, causal=False)
    batch.forward_mode = ForwardMode.DECODE
    with pytest.raises(NotImplementedError, match="a graph with keys of encoders"):
        engine.backend.init_forward_metadata_out_graph(batch)


@pytest.mark.parametrize("number", [4, 9])
def test_blocks_of_drafts_that_see_one_another(number, plugin, engines_by_definition):
    """As a draft model has them that fills a block at once."""
    engine = prepared(Engine(plugin, LayerShape(), page_size=16))
    engine.layers = [layer_of(LayerShape(), **ENCODER)]
    plan = {1: number, 2: number}
    engine.step(plan, mode="TARGET_VERIFY", spec_info=chain(number))


def advance_in_chunks(engine: Engine) -> None:
    """Prompts, decoding with and without a graph, and drafts of a last layer that sees chunks."""
    engine.layers[-1].use_irope, engine.layers[-1].sliding_window_size = True, -1
    engine.admit(1, 60)
    engine.admit(2, 60)
    engine.step({1: 20, 2: 7})
    engine.step({1: 1, 2: 1}, mode="DECODE")
    engine.step({2: 11, 1: 1}, mode="MIXED")
    engine.backend.init_cuda_graph_state(4, 4)
    for _ in range(4):
        engine.step({1: 1, 2: 1}, mode="DECODE", graph=True)
    if engine.page_size == 1:
        engine.step({1: 5, 2: 5}, mode="TARGET_VERIFY", spec_info=chain(5))


@pytest.mark.parametrize(("page_size", "windowed"), [(1, False), (1, True), (4, True), (8, False)])
def test_chunks_of_positions(page_size, windowed, plugin, engines_by_definition):
    """Llama 4's layers see no further back than the begin of their chunk."""
    shape = LayerShape(window=8)
    advance_in_chunks(Engine(plugin, shape, page_size=page_size, windowed=windowed, chunk=8))


def test_chunks_that_are_refused(plugin):
    engine = Engine(plugin, LayerShape(), page_size=16, chunk=8)
    engine.layers[0].use_irope = True
    engine.admit(1, 20)
    with pytest.raises(NotImplementedError, match="layers that see chunks of 8 positions"):
        engine.step({1: 9})


def test_pieces():
    found = pieces_of(Tokens([20, 1, 3], [20, 17, 9], decoded=False), 8)
    assert found.rows == [0, 0, 0, 1, 2, 2]
    assert found.first == [0, 8, 16, 16, 0, 8]
    assert found.new == [8, 8, 4, 1, 2, 1]
    assert found.keys == [8, 8, 4, 1, 8, 1]


@pytest.mark.parametrize("page_size", [1, 16])
def test_layers_that_share_keys_bring_none(page_size, plugin, engines_by_definition):
    """Layers that share keys read those of a whole prompt from the pool, as Gemma 3n's do."""
    engine = Engine(plugin, LayerShape(), page_size=page_size)
    engine.admit(1, 30)
    engine.admit(2, 30)
    batch = engine.forward_batch({1: 20, 2: 9}, ForwardMode.EXTEND)
    engine.backend.init_forward_metadata(batch)
    order = [engine.requests[1], engine.requests[2]]
    q, k, v = (torch.cat([getattr(order[0], x)[:20], getattr(order[1], x)[:9]]) for x in "qkv")
    (layer,), q = engine.layers, q.flatten(1)
    engine.backend.forward(q, k, v, layer, batch)
    out = engine.backend.forward_extend(q, None, None, layer, batch, save_kv_cache=False)
    order[0].judge(out[:20].unflatten(1, (4, -1)), 0)
    order[1].judge(out[20:].unflatten(1, (4, -1)), 0)
