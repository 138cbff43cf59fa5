"""The host tier while decode steps go on that never wait for it, on a GPU: every byte is preserved.

Requests move to pinned memory and back on a separate stream, while the main stream appends to
others and attends to them over the cache's pages. Pools are tight: the next request immediately
overwrites the blocks that a request leaves. Contents and outputs are compared on the device, so
that the host waits only at the end, and for a comparison with fp64.

`python -m pytest --hw -m hw tests/kvcache/memory/test_host_tier_hw.py` on compute capability 9.0 or
10.x.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from gqa_lowlatency import decode
from gqa_lowlatency.reference import definition, rounded
from kvcache.books.errors import HostTierFull, PoolExhausted
from kvcache.books.slot_pool import Sizes
from kvcache.layouts.models import gqa
from kvcache.memory.cache import Cache
from tests.kvcache.memory import test_cache
from tests.kvcache.memory.shadow import Shadow, verdicts

pytestmark = [pytest.mark.hw, pytest.mark.xdist_group("kvcache-hw")]

LAYERS, HEADS, Q_HEADS, DIM, PAGE = 4, 8, 32, 128, 64
LAYOUT = gqa(LAYERS, HEADS, DIM, block_tokens=PAGE)  # 1 MiB a block
SIZES = Sizes(blocks=200, host_blocks=500)
MOST_RUNNING, MOST_REQUESTS = 8, 16
BLOCKS = (4, 50)  # of a request
ROUNDS = 1000  # number of offloads and fetches
STEPS = 4 * ROUNDS  # at most, so that an error in the test ends
QUEUED = 30_000_000  # cycles of work on the main stream that is unfinished when a request leaves
COMPARED = 40  # one step in 40 is compared with fp64


@dataclass
class Counts:
    """Numbers of events; wrong rows and numbers that are not finite are counted on the device."""

    wrong: torch.Tensor
    offloads: int = 0
    fetches: int = 0
    steps: int = 0
    refused: int = 0  # because blocks still waited for a transfer
    compared: int = 0

    @property
    def rounds(self) -> int:
        return self.offloads + self.fetches


class Engine:
    """Requests that decode, requests on the host, and random choices between them."""

    def __init__(self, seed: int, *, deferred: bool) -> None:
        self.pick = random.Random(seed)
        cache = Cache(LAYOUT, SIZES, device="cuda", deferred=deferred)
        self.shadow, self.cache = Shadow(cache), cache
        self.counts = Counts(torch.zeros(1, dtype=torch.int64, device="cuda"))
        self.pages = [
            [cache.pages(name, layer, torch.bfloat16, (HEADS, DIM)) for name in "kv"]
            for layer in range(LAYERS)
        ]
        self.texts = [self._tokens(BLOCKS[1] * PAGE) for _ in range(3)]
        self.names = 0

    def _tokens(self, count: int) -> list[int]:
        return [self.pick.randrange(1 << 17) for _ in range(count)]

    def _of(self, resident: bool) -> list:
        return [r for r in self.shadow.histories if r.resident == resident]

    def run(self, rounds: int) -> Counts:
        while self.counts.rounds < rounds and self.counts.steps < STEPS:
            running = self._of(True)
            moves = [self.offload] * (len(running) > 2) + [self.fetch] * bool(self._of(False))
            if len(running) < MOST_RUNNING and len(self.shadow.histories) < MOST_REQUESTS:
                moves.append(self.admit)
            self.pick.choice(moves or [self.free])()
            self.step()
        for request in self._of(False):
            self._bring(request)
            self.step()
            if not request.freed:
                self.look(request)
        torch.cuda.synchronize()
        self.cache.manager.poll()
        self.cache.manager.check()
        return self.counts

    def _bring(self, request) -> None:
        """Fetch a request to the device; others make room."""
        while not request.resident:
            try:
                self.shadow.fetch(request)
            except PoolExhausted:
                if self._of(True):
                    self.free()
                torch.cuda.synchronize()

    def offload(self) -> None:
        """Offload a request, while another one needs its blocks immediately."""
        torch.cuda._sleep(QUEUED)  # the host is ahead of the GPU, as under a large model
        try:
            self.cache.offload(self.pick.choice(self._of(True)))
            self.counts.offloads += 1
        except HostTierFull:
            self.shadow.free(self.pick.choice(self._of(False)))
        self.admit()

    def fetch(self) -> None:
        request = self.pick.choice(self._of(False))
        try:
            self.shadow.fetch(request)
            self.counts.fetches += 1
        except PoolExhausted as refused:
            self.counts.refused += refused.held > 0
            return
        if self.pick.random() < 0.1:  # freed while its transfer is unfinished
            self.shadow.free(request)
            self.admit()

    def free(self) -> None:
        self.shadow.free(self.pick.choice(self._of(True)))

    def admit(self) -> None:
        text = self.pick.choice(self.texts)
        prompt = text[: self.pick.randrange(BLOCKS[1]) * PAGE]
        new = self.pick.randrange(BLOCKS[0], BLOCKS[1] + 1) * PAGE + 7
        prompt = (prompt + self._tokens(new))[: BLOCKS[1] * PAGE]
        self.names += 1
        request = self.shadow.enter(f"r{self.names}", prompt)
        try:
            self.shadow.append({request: prompt[request.length :]})
        except PoolExhausted as refused:
            self.counts.refused += refused.held > 0
            self.shadow.free(request)

    def step(self) -> None:
        """Append a token to every resident request, and run attention over it in every layer."""
        running = [r for r in self._of(True) if r.length]
        if not running:
            return
        try:
            self._step(running)
        except PoolExhausted as refused:
            self.counts.refused += refused.held > 0
            self.shadow.free(self.pick.choice(running))

    def _step(self, running: list) -> None:
        q = torch.randn(len(running), Q_HEADS, DIM, device="cuda").bfloat16()
        compared = self.pick.randrange(COMPARED) == 0
        with self.cache.step({r: self._tokens(1) for r in running}) as step:
            tensors = self.shadow.write(step)
            given = {"kv_lens": tensors["lengths"], "page_table": tensors["block_tables"]}
            for layer, (k, v) in enumerate(self.pages):
                o, lse = decode(q, k, v, return_lse=True, **given)
                self.counts.wrong += (~o.isfinite()).sum()
                if compared and layer == LAYERS - 1:
                    self.compare(running[0], layer, (q[:1], o[:1], lse[:1]))
        self.counts.steps += 1
        self.look(self.pick.choice(running))

    def look(self, request) -> None:
        """Count a request's wrong bytes without waiting."""
        self.counts.wrong += self.shadow.wrong(request)

    def compare(self, request, layer: int, found: tuple[torch.Tensor, ...]) -> None:
        """Compare attention with the definition, with the tolerance for dense keys."""
        q = found[0].cpu()
        keys = [self.shadow.entries(request, name, layer).cpu() for name in "kv"]
        keys = [x.view(1, -1, HEADS, DIM) for x in keys]
        judged = verdicts(found[1:], definition(q, *keys), rounded(q, *keys))
        self.counts.wrong += sum(not verdict.ok for verdict in judged)
        self.counts.compared += 1


def test_a_thousand_rounds_beside_decode():
    counts = Engine(1, deferred=True).run(ROUNDS)
    print(counts)
    assert counts.rounds >= ROUNDS
    assert counts.compared
    assert not counts.wrong.item(), counts


def test_without_the_deferral_bytes_are_lost():
    """This shows that the test above notices errors; a GPU with other work may miss the moment."""
    runs = (Engine(seed, deferred=False).run(ROUNDS // 5) for seed in range(6))
    assert any(counts.wrong.item() for counts in runs)


@pytest.mark.parametrize("leave", ["free", "preempt", "offload"])
def test_a_hit_waits_for_what_is_on_its_way(leave):
    """A request that is freed while it is being fetched leaves blocks that others find."""
    shadow = Shadow(Cache(LAYOUT, Sizes(blocks=130, host_blocks=250), device="cuda"))
    cache, pick = shadow.cache, random.Random(4)
    prompt = [pick.randrange(1 << 17) for _ in range(120 * PAGE)]
    away = shadow.admit("away", prompt)
    cache.offload(away)
    torch.cuda.synchronize()
    cache.manager.clear()
    shadow.free(shadow.admit("other", [pick.randrange(1 << 17) for _ in range(120 * PAGE)]))
    cache.manager.clear()
    torch.cuda.synchronize()
    torch.cuda._sleep(QUEUED)  # the transfer then begins when the next step does
    shadow.fetch(away)
    if leave == "offload":
        cache.offload(away)
    else:
        getattr(cache, leave)(away)
        del shadow.histories[away]
    again = shadow.enter("again", prompt)
    assert again.length == 119 * PAGE
    shadow.append({again: prompt[again.length :]})
    assert not shadow.wrong(again).item()


# -- the whole cache ------------------------------------------------------------------------------


@test_cache.each_layout
def test_a_life(layout):
    test_cache.test_a_life(layout, "cuda")


@test_cache.each_layout
@pytest.mark.parametrize("seed", range(3))
def test_random_lives(layout, seed):
    test_cache.test_random_lives(layout, True, seed, "cuda")


@test_cache.each_layout
def test_every_hit_is_as_if_it_were_cold(layout):
    test_cache.every_hit(layout, range(0, 4 * layout.block_tokens + 3, 2), device="cuda")


@pytest.mark.parametrize("pool", test_cache.Pool)
def test_corruption_is_noticed(pool):
    test_cache.test_every_guard_is_looked_at(pool, "cuda")


def test_what_was_corrupted_is_not_used():
    test_cache.test_a_corrupted_block_is_not_hit("cuda")
    test_cache.test_a_corrupted_checkpoint_is_not_restored("cuda")
    for pool in (test_cache.Pool.HOST_BLOCKS, test_cache.Pool.HOST_STATES):
        test_cache.test_what_was_corrupted_on_the_host_does_not_come_back(pool, "cuda")
