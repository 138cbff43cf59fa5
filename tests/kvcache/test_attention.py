"""Attention straight from the cache: tables as in a step, keys and values where they are stored.

The cache is used first (hits, forks with copies on write, drafts rolled back, the host tier, blocks
of former requests), and slots that nothing holds are NaN. Then the operators read the pages of
every layer in place, with the tolerance for dense tensors of the true values.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import fmha.reference
import gqa_lowlatency.reference
from kernelkit.call.launch import watching
from kvcache.books.slot_pool import Sizes
from kvcache.books.work import Pool
from kvcache.layouts.layout import Layout, Ring
from kvcache.layouts.models import Options, deepseek_v4, gqa
from kvcache.memory.cache import Cache
from tests.kvcache.memory.shadow import NAN_BYTE, Shadow, ids, verdicts

BF16 = torch.bfloat16
ARCHS = ("sm_90a", "sm_100a")


@dataclass(frozen=True)
class Layers:
    """Plain keys and values: tokens per block, layers, KV heads, query heads of each, columns."""

    block: int = 16
    layers: int = 2
    heads: int = 2
    group: int = 2
    dim: int = 64
    window: int = 0
    draft: int = 2

    def __str__(self) -> str:
        return f"page{self.block}-h{self.heads}x{self.group}-d{self.dim}" + "-window" * (
            self.window > 0
        )

    @property
    def layout(self) -> Layout:
        marks = (True, False) * (self.layers // 2) if self.window else ()
        return gqa(
            self.layers, self.heads, self.dim,
            block_tokens=self.block, draft=self.draft, window=self.window, windowed=marks,
        )  # fmt: skip


# -- a used cache ---------------------------------------------------------------------------------


def forget(shadow: Shadow) -> None:
    """Write NaN to every slot that no request holds or can find."""
    manager = shadow.cache.manager
    for pool in (Pool.BLOCKS, Pool.STATES):
        slots = manager.pools[pool]
        for slot in range(slots.first, slots.first + slots.slots):
            if not slots.holders(slot) and slots.key(slot) is None:
                shadow.cache.storage.pools[pool][slot] = NAN_BYTE


def lived(layout: Layout) -> Shadow:
    """Return a used cache with four requests: two share blocks, one was rolled back, one was
    offloaded."""
    size = layout.block_tokens
    sizes = Sizes(14, states=6, checkpoints=6, host_blocks=6, host_states=2)
    shadow = Shadow(Cache(layout, sizes))
    prompt = ids(2 * size + 5)
    gone = shadow.admit("gone", ids(3 * size, 1))
    shadow.free(gone)
    shadow.cache.manager.clear()
    forget(shadow)
    first = shadow.admit("first", prompt, chunk=size - 1)
    hit = shadow.admit("hit", [*prompt[: 2 * size], *ids(size + 1, 2)])
    assert hit.blocks[:2] == first.blocks[:2]
    child = shadow.fork(first, "child")
    shadow.append({child: [1], first: [2]})
    assert child.blocks[-1] != first.blocks[-1]
    if layout.draft:
        shadow.append({hit: [5] * min(2, layout.draft)})
        shadow.rollback(hit, min(2, layout.draft))
    shadow.cache.offload(child)
    forget(shadow)
    shadow.admit("short", [7])
    shadow.fetch(child)
    forget(shadow)
    shadow.check()
    return shadow


class Spy:
    """Record the tensors that launches read or write in place."""

    def __init__(self) -> None:
        self.places: set[tuple] = set()

    def watch(self, _, addressed: list[tuple[torch.Tensor, int]]) -> None:
        self.places |= {_place(tensor) for tensor, offset in addressed if not offset}

    def saw(self, *tensors: torch.Tensor) -> bool:
        """Whether these very bytes, in the same order, were used, and no copy."""
        return self.places.issuperset(map(_place, tensors))


def _place(tensor: torch.Tensor) -> tuple:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


@pytest.fixture
def spy():
    watcher = Spy()
    with watching(watcher.watch):
        yield watcher


def lie_in(pool: torch.Tensor, pages: torch.Tensor) -> bool:
    """Whether `pages` is a view of the pool, with the pool's order and distance of slots."""
    begin = pages.data_ptr() - pool.data_ptr()
    same = pages.untyped_storage().data_ptr() == pool.untyped_storage().data_ptr()
    apart = pages.stride(0) * pages.itemsize == pool.stride(0) > pages[0].numel() * pages.itemsize
    return same and apart and 0 <= begin < pool.stride(0)


def judge(found, exact, rounded) -> None:
    """Check O and LSE, by the tolerance of the packages."""
    for verdict in verdicts(found, exact, rounded):
        assert verdict.ok, str(verdict)


def judge_each(shadow, copy, names, q, found, family, **options) -> None:
    """Judge the newest token of each request over the keys that it sees in one copy of two
    arrays."""
    for index, request in enumerate(shadow.histories):
        mine, o, lse = (x[index : index + 1] for x in (q, *found))
        keys = [shadow.entries(request, name, copy, newest=True) for name in names]
        keys = [x.view(1, len(x), -1, q.shape[-1]) for x in keys]
        definition, rounded = family.reference.definition, family.reference.rounded
        judge((o, lse), definition(mine, *keys, **options), rounded(mine, *keys, **options))


def random_queries(count: int, heads: int, dim: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, heads, dim, generator=generator).bfloat16()


def step_of(shadow: Shadow, tokens: int = 1):
    """Return an open step with the next tokens of every request."""
    batch = {request: ids(tokens, 9) for request in shadow.histories}
    return shadow.cache.step(batch)


# -- plain keys and values ------------------------------------------------------------------------


def check_decode(shape: Layers, arch: str, spy: Spy) -> None:
    """Decode one token of every request, in all layers, by `gqa_lowlatency.decode`."""
    layout = shape.layout
    shadow = lived(layout)
    entry, pool = (shape.heads, shape.dim), shadow.cache.storage.pools[Pool.BLOCKS]
    with step_of(shadow) as step:
        tables = shadow.write(step)
        q = random_queries(len(step.requests), shape.heads * shape.group, shape.dim)
        for copy in range(layout.find("k").copies):
            k, v = (shadow.cache.pages(name, copy, BF16, entry) for name in "kv")
            assert k.shape == (15, shape.block, *entry)
            assert lie_in(pool, k)
            assert lie_in(pool, v)
            lens, table = tables["lengths"], tables["block_tables"]
            found = gqa_lowlatency.decode(
                q, k, v, kv_lens=lens, page_table=table, arch=arch, return_lse=True
            )
            assert spy.saw(k, v, lens, table)
            judge_each(shadow, copy, "kv", q, found, gqa_lowlatency, arch=arch)
        assert (table == 0).any()  # the null block, after the short ones
    shadow.check()


def check_prefill(shape: Layers, tokens: int, spy: Spy) -> None:
    """Process some tokens of every request after those in the cache, by `fmha.attention`."""
    layout = shape.layout
    shadow = lived(layout)
    entry, pool = (shape.heads, shape.dim), shadow.cache.storage.pools[Pool.BLOCKS]
    with step_of(shadow, tokens) as step:
        tables = shadow.write(step)
        q = random_queries(len(step.positions), shape.heads * shape.group, shape.dim)
        for copy in range(layout.find("k").copies):
            k, v = (shadow.cache.pages(name, copy, BF16, entry) for name in "kv")
            lens, table = tables["lengths"], tables["block_tables"]
            found = fmha.attention(
                q, k, v, causal=True, kv_lens=lens, page_table=table,
                cu_seqlens_q=tables["cu_tokens"], return_lse=True,
            )  # fmt: skip
            assert spy.saw(k, v, lens, table)
            assert lie_in(pool, k)
            for index, request in enumerate(step.requests):
                keys = [shadow.entries(request, name, copy).view(1, -1, *entry) for name in "kv"]
                mine = slice(index * tokens, (index + 1) * tokens)
                exact, rounded = (
                    f(q[None, mine], *keys, causal=True)
                    for f in (fmha.reference.definition, fmha.reference.rounded)
                )
                judge((found[0][None, mine], found[1][None, :, mine]), exact, rounded)
    shadow.check()


def test_decode_reads_pages_in_place(spy):
    check_decode(Layers(), "sm_90a", spy)


def test_prefill_reads_pages_in_place(spy):
    check_prefill(Layers(layers=1), 5, spy)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "shape",
    [Layers(4), Layers(8, dim=128, group=4), Layers(32, heads=1, group=8, dim=128),
     Layers(64, dim=256), Layers(128, layers=3, heads=3, group=1)],
    ids=str,
)  # fmt: skip
def test_decode(shape, arch, spy):
    check_decode(shape, arch, spy)


@pytest.mark.parametrize(
    ("shape", "tokens"),
    [(Layers(8, dim=128), 3), (Layers(32, heads=1, group=8, dim=96), 40), (Layers(64, dim=256), 1),
     (Layers(128, layers=3, group=1), 130)],
    ids=str,
)  # fmt: skip
def test_prefill(shape, tokens, spy):
    check_prefill(shape, tokens, spy)


# -- rings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("draft", [0, 1])
def test_a_ring_is_a_page(arch, draft, spy):
    """The ring has as many rows as the window: softmax does not depend on their order."""
    window = 32
    shape = Layers(window=window, draft=draft)
    shadow = lived(shape.layout)
    entry, cache = (shape.heads, shape.dim), shadow.cache
    for _ in range(3):
        with step_of(shadow) as step:
            tables = shadow.write(step)
            q = random_queries(len(step.requests), shape.heads * shape.group, shape.dim)
            k, v = (cache.pages(f"{name}_window", 0, BF16, entry) for name in "kv")
            lens, table = tables["lengths"].clamp(max=window), tables["state_slots"][:, None]
            given = {"page_table": table, "return_lse": True}
            found = gqa_lowlatency.decode(q, k, v, kv_lens=lens, arch=arch, **given)
            assert spy.saw(k, v)
            assert lie_in(cache.storage.pools[Pool.STATES], k)
            names = ("k_window", "v_window")
            judge_each(shadow, 0, names, q, found, gqa_lowlatency, arch=arch)
            found = fmha.attention(q[:, None], k, v, kv_lens=lens, **given)
            assert spy.saw(k, v)
            judge_each(shadow, 0, names, q[:, None], found, fmha)
    assert max(request.length for request in shadow.histories) > window + 3


@pytest.mark.parametrize("draft", [3, 8])
def test_a_ring_with_drafts_is_no_page(draft):
    """Such a ring has rows that the next token does not see."""
    shadow = Shadow(Cache(Layers(window=32, draft=draft).layout, Sizes(4, states=2)))
    words = f"ring 'k_window' has {32 + draft - 1} rows for a window of 32"
    with pytest.raises(ValueError, match=words):
        shadow.cache.pages("k_window", 0, BF16, (2, 64))


# -- DeepSeek-V4 ----------------------------------------------------------------------------------

V4 = deepseek_v4("v4", [128, 4, 4, 128, 0], 128, Options(record="bf16"))
WIDE = deepseek_v4("v4-wide", [128, 4, 128], 128, Options(record="bf16", block_tokens=1024))
LATENT = (1, 512)


def latents(layout: Layout, tokens: int) -> Shadow:
    shadow = Shadow(Cache(layout, Sizes(12, states=4, checkpoints=4)))
    prompt = ids(tokens)
    first = shadow.admit("first", prompt, chunk=100)
    shadow.admit("second", [*prompt[:-50], *ids(70, 3)])
    shadow.admit("third", ids(140, 4))
    shadow.append({first: [1, 2, 3]})
    forget(shadow)
    shadow.check()
    return shadow


def check_latents(shadow: Shadow, name: str, spy: Spy) -> None:
    """Attend to all entries of a stream or ring, K and V at once, for each request's newest
    token."""
    array, pools = shadow.layout.find(name), shadow.cache.storage.pools
    with step_of(shadow) as step:
        tables = shadow.write(step)
        q = random_queries(len(step.requests), 4, 512)[:, None]
        if isinstance(array, Ring):
            table, pool = tables["state_slots"][:, None], pools[Pool.STATES]
            lens = tables["lengths"].clamp(max=array.window)
        else:
            table, pool = tables["block_tables"], pools[Pool.BLOCKS]
            lens = torch.from_numpy(step.entries(name))
        for copy in (0, array.copies - 1):
            pages = shadow.cache.pages(name, copy, BF16, LATENT)
            found = fmha.attention(q, pages, pages, kv_lens=lens, page_table=table, return_lse=True)
            assert spy.saw(pages, table)
            assert lie_in(pool, pages)
            judge_each(shadow, copy, (name, name), q, found, fmha)


def test_csa_entries(spy):
    check_latents(latents(V4, 300), "csa", spy)


def test_hca_entries_of_wide_blocks(spy):
    """Blocks of 1024 tokens have 8 adjacent entries of a layer, as many as a page."""
    check_latents(latents(WIDE, 1100), "hca", spy)


def test_swa_entries(spy):
    check_latents(latents(V4, 300), "swa", spy)


def test_what_attention_does_not_take():
    """A block of 128 tokens has one HCA entry, less than a page; only fmha has 512 columns."""
    shadow = Shadow(Cache(V4, Sizes(2, states=1)))
    q, one = random_queries(1, 4, 512), torch.ones(1, 1, dtype=torch.int32)
    hca, csa = (shadow.cache.pages(name, 0, BF16, LATENT) for name in ("hca", "csa"))
    assert (hca.shape[1], csa.shape[1]) == (1, 32)
    with pytest.raises(NotImplementedError, match="page_size 1 with TMA: a multiple of 8"):
        fmha.attention(q[:, None], hca, hca, kv_lens=one[0], page_table=one)
    with pytest.raises(NotImplementedError, match="head_dim 512"):
        gqa_lowlatency.decode(q, csa, csa, kv_lens=one[0], page_table=one)
