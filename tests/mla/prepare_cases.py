"""Steps of a DeepSeek-V4 layer over two equal caches: one prepared by a launch for each part, the
other one by `prepare_attention`. Caches and queries must be equal, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from kvcache.books.manager import RESERVED
from kvcache.books.slot_pool import Sizes
from kvcache.books.work import Pool
from kvcache.layouts.latent import ROPE
from kvcache.layouts.models import CSA, HCA, Options, deepseek_v4
from kvcache.memory.cache import Cache
from kvcache.movement.api import append_swa
from mla.compressor import Compressor, Tables, compress
from mla.glue import Queries, norm_rope_append
from mla.indexer import IndexQuery, prepare_query
from mla.prepare.api import Compression, IndexQueries, WindowKeys, prepare_attention
from tests.kvcache.movement.rows_cases import checked

LONGEST = 400  # positions in the tables of angles
STREAMS = {"csa": ("entries", "csa"), "index": ("index_keys", "index"), "hca": ("entries", "hca")}
Parts = dict[str, Any]


@dataclass(frozen=True)
class Setup:
    """A layer and its kernels.

    kind: 'csa' or 'hca'.
    record, draft, online: Options of the layout.
    heads: of the indexer.
    padded: tokens, requests and ends that a step has beyond its own.
    """

    kind: str = "csa"
    record: str = "fp8-index8"
    draft: int = 0
    online: bool = True
    heads: int = 4
    padded: int = 0
    arch: str | None = "sm_90a"
    device: str = "cpu"

    @cached_property
    def layout(self):
        options = Options(record=self.record, draft=self.draft, online_hca=self.online)
        return deepseek_v4("v4", [CSA if self.kind == "csa" else HCA], 128, options)

    @property
    def streams(self) -> tuple[str, ...]:
        return ("csa", "index") if self.kind == "csa" else ("hca",)

    @property
    def place(self) -> dict[str, Any]:
        return {"arch": self.arch}


def cache_of(setup: Setup) -> Cache:
    """Return an empty cache whose memory is NaN in every format."""
    cache = Cache(setup.layout, Sizes(blocks=24, states=6, checkpoints=8), device=setup.device)
    for kind, pool in cache.storage.pools.items():
        pool[RESERVED if kind in (Pool.BLOCKS, Pool.STATES) else 0 :] = 0xFF
    return cache


def padded(name: str, table: torch.Tensor, more: int, tokens: int) -> torch.Tensor:
    """Return a table of a step as a graph's buffers have it, with `more` numbers of padding."""
    nothing = {"cu_tokens": tokens, "positions": 0, "owners": 0, "starts": 0}.get(name, -1)
    rest = torch.full((more, *table.shape[1:]), nothing, dtype=table.dtype, device=table.device)
    return torch.cat((table, rest))


def parts_of(setup: Setup, cache: Cache, arrays: Mapping[str, torch.Tensor], seed: int) -> Parts:
    """Return arguments of `prepare_attention` for a step. Numbers depend on the seed alone."""
    gen, device = torch.Generator().manual_seed(seed), setup.device
    tokens = len(arrays["positions"])
    if setup.padded:
        arrays = {n: padded(n, table, setup.padded, tokens) for n, table in arrays.items()}
        tokens += setup.padded

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=gen).to(device)

    angles = torch.arange(LONGEST)[:, None] * 10000.0 ** (-torch.arange(0, ROPE, 2) / ROPE)
    found: Parts = {
        "arrays": arrays,
        "rope": (angles.cos().to(device), angles.sin().to(device)),
    }
    for stream in setup.streams:
        name, tail = f"{stream}_tail", setup.layout.find(f"{stream}_tail")
        columns = tail.overlap * tail.width
        weights = Compressor(normal(tail.ratio, columns), 1 + 0.1 * normal(tail.width))
        wide = normal(tokens, 2 * columns)  # so that rows are not contiguous
        found[STREAMS[stream][0]] = Compression(
            weights, cache.tail(name, 0), cache.rows(stream, 0), wide[:, :columns],
            3 * wide[:, columns:], stream,
        )  # fmt: skip
    if setup.kind == "csa":
        q, record = normal(tokens, setup.heads, 128).bfloat16(), cache.rows("index", 0).record
        weights = normal(tokens, setup.heads)
        found["index_queries"] = IndexQueries(q, weights, record.name, 0.011)
    found["queries"] = Queries(normal(tokens, 3, 512).bfloat16(), eps=1e-6)
    kv = normal(tokens, 512).bfloat16()
    found["window"] = WindowKeys(cache.rows("swa", 0), kv, arrays["rows_of.swa"])
    return found


def one_by_one(parts: Parts, longest: int | None, place: Mapping[str, Any]) -> IndexQuery | None:
    """Prepare a step by a launch for each part."""
    arrays, (cos, sin) = parts["arrays"], parts["rope"]
    positions = arrays["positions"]
    for name in ("entries", "index_keys"):
        if name in parts:
            given = dict(vars(parts[name]))
            tables = Tables.of(arrays, given.pop("stream"), given["tail"].tail.name)
            compress(**given, tables=tables, cos=cos, sin=sin, longest=longest, **place)
    if "queries" in parts:
        norm_rope_append(positions, parts["rope"], queries=parts["queries"], **place)
    if "window" in parts:
        window = parts["window"]
        append_swa(window.rows, window.kv, positions, window.slots, cos, sin, **place)
    if "index_queries" not in parts:
        return None
    queries = vars(parts["index_queries"])
    shared = {"positions": positions, "cos": cos, "sin": sin}
    return prepare_query(**queries, **shared, **place)


class Twins:
    """Requests by name in two equal caches."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.caches = setup, (cache_of(setup), cache_of(setup))
        self.requests: list[dict[str, Any]] = [{}, {}]
        self.steps = 0

    def step(self, *, hint: bool = True, **batch: int) -> None:
        """Run a step of so many tokens of each request in both caches, and compare."""
        self.steps += 1
        found = []
        for cache, requests in zip(self.caches, self.requests, strict=True):
            new = {}
            for name, count in batch.items():
                tokens = [self.steps * 7 + n for n in range(count)]
                if name not in requests:
                    requests[name] = cache.admit(name, tokens).request
                new[requests[name]] = tokens
            with cache.step(new) as step, checked():
                arrays = step.tensors(self.setup.device)
                parts = parts_of(self.setup, cache, arrays, self.steps)
                longest = step.longest if hint else None
                if cache is self.caches[0]:
                    query = one_by_one(parts, longest, self.setup.place)
                else:
                    query = prepare_attention(**parts, longest=longest, **self.setup.place)
            found.append((query, parts["queries"].q))
        (one, heads), (other, same) = found
        assert torch.equal(heads, same), "queries differ"
        self.check(one, other)

    def back(self, name: str, count: int) -> None:
        """Take tokens of a request back."""
        for cache, requests in zip(self.caches, self.requests, strict=True):
            cache.rollback(requests[name], count)

    def check(self, one: IndexQuery | None, other: IndexQuery | None) -> None:
        """Compare both caches and the queries."""
        for name, pool in self.caches[0].storage.pools.items():
            assert torch.equal(pool, self.caches[1].storage.pools[name]), f"{name} differs"
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            for field, mine, theirs in zip(one._fields, one, other, strict=True):
                same = torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
                assert same, f"{field} of queries differs"
