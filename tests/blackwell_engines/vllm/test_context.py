"""Ranks that share the keys of a request: two of them in step, judged token by token."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from blackwell_engines.vllm.context import Place
from fmha.reference import definition
from tests.blackwell_engines.requests import LayerShape, Request
from tests.blackwell_engines.vllm.engine import RANKS, Engine, config_of

SHAPE = LayerShape(q_heads=4, kv_heads=1)
COUNT = 2


class Group:
    """What vLLM's group of processes does, between threads; a thread sets `here.rank` first."""

    def __init__(self) -> None:
        self.barrier, self.given = threading.Barrier(COUNT, timeout=60), [None] * COUNT
        self.here, self.exchanges = threading.local(), 0

    def exchange(self, value: Any) -> list[Any]:
        self.given[self.here.rank] = value
        self.exchanges += 1
        self.barrier.wait()
        found = [*self.given]
        self.barrier.wait()
        return found

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat(self.exchange(x), dim)

    def combine(self, o: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """O [tokens, heads, D] and LSE [tokens, heads] over all keys, of this rank's heads."""
        parts = self.exchange((o.double(), lse.double()))
        whole = torch.stack([part for _, part in parts]).logsumexp(0)
        weights = [(part - whole).exp().nan_to_num()[..., None] for _, part in parts]
        total = sum(part * w for (part, _), w in zip(parts, weights, strict=True))
        heads = o.shape[1] // COUNT
        own = slice(self.here.rank * heads, (self.here.rank + 1) * heads)
        return total[:, own].to(o.dtype), whole[:, own].float()


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    made = Group()
    monkeypatch.setattr(RANKS, "count", COUNT)
    monkeypatch.setattr(RANKS, "group", made)
    return made


class Ranks:
    """Engines with half of the query heads and of the keys each."""

    def __init__(self, plugin: Any, shape: LayerShape, interleave: int) -> None:
        self.shape, self.interleave, self.engines = shape, interleave, []
        heads = shape.q_heads // COUNT
        for rank in range(COUNT):
            RANKS.own = rank
            engine = Engine(plugin, replace(shape, q_heads=heads, sinks=False))
            engine.builder._place = Place(rank, COUNT, interleave)
            if shape.sinks:
                engine.impl.sinks = shape.sink_logits[rank * heads : (rank + 1) * heads]
            self.engines.append(engine)
        RANKS.own = 0

    def admit(self, name: int, length: int) -> None:
        for engine in self.engines:
            engine.requests[name] = Request(name, self.shape, length)

    def slots(self, rank: int, order: list[Request], plan: dict[int, int]) -> torch.Tensor:
        """Where a rank keeps the new tokens; -1 for those of others."""
        found, turn = [], COUNT * self.interleave
        for request in order:
            for token in range(request.done, request.done + plan[request.name]):
                own = token % turn // self.interleave == rank
                place = token // turn * self.interleave + token % self.interleave
                found.append(request.pages[place // 16] * 16 + place % 16 if own else -1)
        return torch.tensor(found)

    def run(self, rank: int, plan: dict[int, int]) -> torch.Tensor:
        RANKS.group.here.rank = rank
        engine = self.engines[rank]
        common, order = engine.metadata(plan)
        new = [slice(r.done, r.done + n) for r, n in zip(order, plan.values(), strict=True)]
        q, k, v = (torch.cat([getattr(r, x)[p] for r, p in zip(order, new, strict=True)])
                   for x in "qkv")  # fmt: skip
        heads = self.shape.q_heads // COUNT
        q = q[:, rank * heads : (rank + 1) * heads]
        slots = self.slots(rank, order, plan)
        engine.impl.do_kv_cache_update(engine.layer, k, v, engine.cache, slots)
        out = torch.empty_like(q)
        step = engine.builder.build(0, common)
        return engine.impl.forward(engine.layer, q, k, v, engine.cache, step, out)

    def step(self, plan: dict[int, int], most: float | None = None) -> None:
        """Run a step and judge it, with `most` loosely: new keys are not rounded to e4m3."""
        with ThreadPoolExecutor(COUNT) as pool:
            parts = [*pool.map(lambda rank: self.run(rank, plan), range(COUNT))]
        out, first = torch.cat(parts, 1), 0
        for name, new in plan.items():
            for engine in self.engines[1:]:
                engine.requests[name].done += new
            request = self.engines[0].requests[name]
            tokens, end = out[first : first + new], request.done + new
            if most is None:
                request.judge(tokens, request.done)
            else:
                k, v = request.k[None, :end], request.v[None, :end]
                exact = definition(request.q[None, request.done : end], k, v, causal=True).o[0]
                assert (tokens.double() - exact).abs().max() < most
            request.done, first = request.done + new, first + new


@pytest.mark.parametrize("interleave", [1, 4])
@pytest.mark.parametrize("sinks", [False, True])
def test_two_ranks(sinks, interleave, plugin, group, engines_by_definition):
    """Prompts, a prompt of one token, pieces, decoding, both in a step."""
    ranks = Ranks(plugin, replace(SHAPE, sinks=sinks), interleave)
    for name in range(1, 6):
        ranks.admit(name, 80)
    ranks.step({1: 20})
    assert not group.exchanges, "a prompt without a past sees its own keys alone"
    ranks.step({4: 1, 5: 20})
    assert group.exchanges, "the key of a prompt's only token is one rank's"
    ranks.step({1: 1, 2: 33, 3: 1})
    ranks.step({1: 1, 3: 1, 2: 17})
    ranks.step({1: 1, 2: 1, 3: 1})
    assert engines_by_definition.count("decode") >= 2 * COUNT


def test_two_ranks_with_caches_in_e4m3(plugin, group, engines_by_definition):
    """Scales are of the cache: new tokens see one another by keys that were never scaled."""
    shape = replace(SHAPE, kv_dtype=torch.float8_e4m3fn, scales=(0.5, 0.25))
    ranks = Ranks(plugin, shape, 1)
    for name in (1, 2):
        ranks.admit(name, 80)
    ranks.step({1: 20}, most=0.3)
    ranks.step({1: 1, 2: 33}, most=0.3)
    ranks.step({1: 17, 2: 4}, most=0.3)


@pytest.mark.parametrize("interleave", [1, 4])
def test_every_key_has_one_place(interleave):
    lengths = torch.arange(60, dtype=torch.int32)
    places = [Place(rank, 3, interleave) for rank in range(3)]
    parts = torch.stack([place.keys(lengths) for place in places])
    assert torch.equal(parts.sum(0), lengths)
    assert (parts.diff() >= 0).all()
    assert all(parts[:, n].max() <= places[0].most(n) for n in range(60))


def test_a_captured_step_reads_lengths_in_place(plugin, group):
    """The next step's keys of this rank are where those of the captured one were."""
    engine = Engine(plugin, SHAPE)
    engine.admit(1, 60)
    common, _ = engine.metadata({1: 1})
    step = engine.builder.build_for_cudagraph_capture(common)
    assert step.seq_lens.tolist() == [1]
    common.seq_lens += 20
    engine.builder.build(0, common)
    assert step.seq_lens.tolist() == [11]


def test_layers_that_ranks_cannot_share(plugin, group, monkeypatch):
    monkeypatch.setattr(plugin.BlackwellKernelsImpl, "dcp_world_size", COUNT)
    given = (4, 64, 0.125, 1, None)
    with pytest.raises(NotImplementedError, match="sliding_window 9 with decode_context_parallel"):
        plugin.BlackwellKernelsImpl(*given, 9)
    with pytest.raises(NotImplementedError, match=r"attn_type encoder_decoder, .* shared by ranks"):
        plugin.BlackwellKernelsImpl(*given, None, "auto", None, "encoder_decoder")
    spec = Engine(plugin, SHAPE).builder.kv_cache_spec
    spec.attention_chunk_size = 32
    with pytest.raises(NotImplementedError, match="attention_chunk_size 32"):
        plugin.BlackwellKernelsBuilder(spec, ["layer"], config_of(), None)
