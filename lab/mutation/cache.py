"""The kernels that move entries of a cache, and those of sparse attention over its pages, whose
mutants are judged. Pools are compared whole."""

from __future__ import annotations

from unittest import mock

import torch

from kvcache.books.slot_pool import Sizes
from kvcache.layouts.latent import LATENTS, ROPE
from kvcache.layouts.models import CSA, HCA, Options, deepseek_v4
from kvcache.layouts.records import BF16_512, FP8_584, INDEXER_FP4, INDEXER_FP8, Record
from kvcache.layouts.rows import Rows
from kvcache.memory.cache import Cache
from kvcache.movement.api import append_rows, append_swa, checksum, copy_slots, gather
from lab.mutation.subject import Results, Subject
from mla.compressor.api import Compressor, Tables, compress
from mla.indexer.api import IndexQuery, prepare_query, scores, select
from mla.indexer.quantised import quantised

SLOTS, ROWS, TOKENS = 5, 8, 9
# Of the indexer; one CTA comes round the ring of 8 stages and waits for each of them to be free.
HEADS, KEYS, BLOCK = 64, 17 * 128 + 90, 32
POSITIONS = 256


def _random() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _pool(slot_bytes: int, slots: int = SLOTS) -> torch.Tensor:
    return torch.randint(0, 120, (slots, slot_bytes), dtype=torch.uint8, generator=_random())


def _rows(record: Record, rows: int = ROWS, slots: int = SLOTS) -> Rows:
    scales = 16 + rows * record.data_bytes
    scales += -scales % 16
    size = scales + rows * record.scale_bytes + 16
    return Rows(_pool(size + -size % 16, slots), 16, scales, rows, record)


def _angles() -> tuple[torch.Tensor, torch.Tensor]:
    inverse = 10000.0 ** (-torch.arange(0, ROPE, 2) / ROPE)
    angles = torch.arange(POSITIONS)[:, None] * inverse
    return angles.cos(), angles.sin()


def _mapping(count: int = TOKENS) -> torch.Tensor:
    """Entries in any order, one of them none."""
    found = torch.randperm(SLOTS * ROWS, generator=_random())[:count]
    found[3] = -1
    return found


def _append(record: Record) -> Results:
    rows, kv = _rows(record), torch.randn(TOKENS, LATENTS[record.name].elements).bfloat16()
    append_swa(rows, kv, torch.arange(TOKENS), _mapping(), *_angles(), arch="sm_90a")
    return (rows.pool,)


def _append_plain() -> Results:
    rows = _rows(Record("plain", 8 * 64 * 2))
    x = torch.randn(TOKENS, 8, 64, generator=_random()).bfloat16()
    append_rows((rows, x), None, _mapping(), arch="sm_90a")
    return (rows.pool,)


def _gather(record: Record) -> Results:
    out = torch.empty(TOKENS, LATENTS[record.name].elements, dtype=torch.bfloat16)
    gather(_rows(record), _mapping(), out, arch="sm_90a")
    return (out,)


def _copy() -> Results:
    pool = _pool(8208)
    copy_slots(pool, pool, torch.tensor([[0, 3], [1, 4]]), arch="sm_90a")
    return (pool,)


def _checksum() -> Results:
    """More pieces than CTAs, so that they take turns."""
    with mock.patch("kvcache.movement.config.CTAS", 2):
        return (checksum(_pool(12288), torch.tensor([3, 0, 1]), 16, 8240, arch="sm_90a"),)


def _queries() -> tuple[torch.Tensor, torch.Tensor]:
    """Of three tokens, and weights."""
    q = torch.randn(3, HEADS, 128, generator=_random()).bfloat16()
    return q, torch.randn(3, HEADS, generator=_random())


def _prepare(record: str) -> Results:
    found = prepare_query(*_queries(), torch.arange(3), *_angles(), record=record, arch="sm_100a")
    return tuple(each.view(torch.uint8) for each in found)


def _scores(record: Record, arch: str) -> Results:
    q, weights = _queries()
    data, scales = quantised(q, record)
    if record is INDEXER_FP8:  # its scale is part of the weight
        data, scales = data.view(torch.float8_e4m3fn), scales[..., :0]
    blocks = -(-KEYS // BLOCK)
    query, rows = IndexQuery(data, scales, weights), _rows(record, BLOCK, 2 * blocks)
    tables = torch.randperm(2 * blocks, generator=_random()).view(2, blocks).int()
    out = torch.full((3, KEYS + 2), 7.0)
    owners, counts = torch.tensor([0, 1, 1]).int(), torch.tensor([70, 33, KEYS]).int()
    with mock.patch("mla.indexer.scores_launch.grid_for", return_value=(1, len(q))):
        scores(rows, query, owners, counts, tables, out, arch=arch)
    return (out,)


def _select(k: int, candidates: int) -> Results:
    """Few different scores, so that many are equal."""
    found = torch.randint(-9, 9, (3, candidates), generator=_random()).float()
    return select(found, torch.tensor([candidates, k, 0]).int(), k, arch="sm_90a")


def _compress(
    kind: str, counts: tuple[int, ...], more: tuple[int, ...] = (5,), online: bool = False
) -> Results:
    """Steps that complete windows: one of so many tokens of each request, then `more` of all. They
    read tails, and write what they have read there."""
    layout = deepseek_v4("v4", [HCA, CSA, 0], 128, Options(record="bf16", online_hca=online))
    cache = Cache(layout, Sizes(blocks=24, states=6, checkpoints=8))
    tail = cache.tail(f"{kind}_tail", 0)
    columns = tail.tail.overlap * tail.tail.width
    ape = torch.randn(tail.tail.ratio, columns, generator=_random())
    weights = Compressor(ape, torch.ones(tail.tail.width), 1e-6)
    requests = [cache.admit(str(index), [index] * count).request
                for index, count in enumerate(counts)]  # fmt: skip
    for step_counts in (counts, *((count,) * len(counts) for count in more)):
        batch = {
            request: [index] * count
            for index, (request, count) in enumerate(zip(requests, step_counts, strict=True))
        }
        cos, sin = _angles()
        with cache.step(batch) as step:
            tables = Tables.of(step.tensors("cpu"), kind, f"{kind}_tail")
            values, ranks = torch.randn(2, len(tables.positions), columns, generator=_random())
            compress(weights, tail, cache.rows(kind, 0), values, ranks, tables, cos=cos, sin=sin,
                     longest=step.longest, arch="sm_90a")  # fmt: skip
    return tuple(pool.clone() for pool in cache.storage.pools.values())


SUBJECTS: dict[str, Subject] = {
    "cache append": Subject(lambda: _append(FP8_584)),
    "cache append bf16": Subject(lambda: _append(BF16_512)),
    "cache append rows": Subject(_append_plain),
    "cache gather": Subject(lambda: _gather(FP8_584)),
    "cache copy": Subject(_copy),
    "cache checksum": Subject(_checksum),
    "index query": Subject(lambda: _prepare("indexer_fp4")),
    "index scores warps": Subject(lambda: _scores(INDEXER_FP8, "sm_90a")),
    "index scores tcgen05": Subject(lambda: _scores(INDEXER_FP4, "sm_100a")),
    "index select": Subject(lambda: _select(40, 600)),
    "compressor csa": Subject(lambda: _compress("csa", (11, 6))),
    # More tokens in front of a step's window, and behind it, than a thread has rows.
    "compressor hca": Subject(lambda: _compress("hca", (130, 125), (14, 130))),
    "compressor online": Subject(lambda: _compress("hca", (130, 125), online=True)),
}
