"""Rows between the projections of a layer: norm, RoPE, cast and append in one launch.

A problem is one launch of a layer of DeepSeek-V3.2 or V4. Bytes are rows, results, tables and
weights, each once. torch computes the parts one after another, as a model would write them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from kvcache.layouts.records import INDEXER_FP8
from kvcache.layouts.rows import Rows
from kvcache.movement.reference import rotated_rope
from lab.problems.steps import Arguments, Maker, Problem, expect_equal, normal
from mla.attention.formats import FORMS
from mla.glue import reference
from mla.glue.api import IndexKeys, LatentKeys, LowRank, Queries, norm_rope_append
from mla.glue.config import STORED
from mla.indexer import quantised as index_records
from mla.indexer.formats import V32, WIDTH

PAGE, EPS, RANK = 64, 1e-6, 1536
ANGLES = 128 * 2  # bytes of a token's cosines and sines
# name -> (record of keys, whether there are index keys, rank of low-rank queries, heads, normed)
LAUNCHES = {
    "V3.2, q_a, key fp8_656, index key": ("fp8_656", True, RANK, 0, False),
    "V3.2, 128 heads": ("", False, 0, 128, False),
    "V4, q_a, key fp8_584": ("fp8_584", False, RANK, 0, False),
    "V4, 64 heads, normed": ("", False, 0, 64, True),
}

Given = Mapping[str, Any]


def makers() -> list[Maker]:
    """Return the makers of the step."""
    return [partial(_launch, name) for name in LAUNCHES]


def _rows(record: Any, count: int, device: str) -> Rows:
    pages = -(-2 * count // PAGE)
    pool = torch.zeros(pages, record.page_bytes(PAGE), dtype=torch.uint8, device=device)
    return Rows(pool, 0, PAGE * record.data_bytes, PAGE, record)


def _slots(rows: Rows, count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(rows.entries, generator=generator)[:count].to(rows.pool.device)


def _launch(name: str, count: int) -> Problem:
    record, indexed, rank, heads, normed = LAUNCHES[name]

    def draw(seed: int, device: str) -> Arguments:
        angles = normal(seed, device, count, 32).float()
        rope = angles.cos(), angles.sin()
        given: dict[str, Any] = {"positions": torch.arange(count, device=device), "rope": rope}
        if record:
            rows = _rows(STORED[record], count, device)
            x = normal(seed + 1, device, count, FORMS[record].columns)
            weight = normal(seed + 2, device, 512)
            given["keys"] = LatentKeys(x, rows, _slots(rows, count, seed), weight, EPS)
        if indexed:
            rows = _rows(INDEXER_FP8, count, device)
            x, norm = normal(seed + 3, device, count, WIDTH), normal(seed + 4, device, 2, WIDTH)
            slots = _slots(rows, count, seed)
            given["index_keys"] = IndexKeys(x, rows, slots, *norm, EPS, V32)
        if rank:
            x, weight = normal(seed + 5, device, count, rank), normal(seed + 6, device, rank)
            given["low_rank"] = LowRank(x, weight, torch.empty_like(x), EPS)
        if heads:
            q = normal(seed + 7, device, count, heads, 512 if normed else 192)
            given["queries"] = Queries(q, torch.empty_like(q), EPS if normed else None)
        return (given,)

    nbytes = count * (8 + ANGLES) + rank * 2 * (1 + 2 * count)
    if record:
        nbytes += count * (FORMS[record].columns * 2 + STORED[record].bytes + 8) + 1024
    if indexed:
        nbytes += count * (WIDTH * 2 + INDEXER_FP8.bytes + 8) + 4 * WIDTH
    nbytes += count * heads * (512 if normed else 64) * 4
    peers = {"mla": _ours, "torch": _by_torch}
    return Problem("norm_rope", name, count, nbytes, draw, peers, _check)


def _ours(given: Given) -> None:
    norm_rope_append(**given)


def _put(rows: Rows, slots: torch.Tensor, data: torch.Tensor, scales: torch.Tensor) -> None:
    place = slots // rows.rows, slots % rows.rows
    rows.data()[place] = data
    if rows.record.scale_bytes:
        rows.scales()[place] = scales


def _by_torch(given: Given) -> None:
    """Each part by functions of torch."""
    rope = tuple(table[given["positions"]] for table in given["rope"])
    keys, index = given.get("keys"), given.get("index_keys")
    low, queries = given.get("low_rank"), given.get("queries")
    if low is not None:
        low.out.copy_(functional.rms_norm(low.x, low.weight.shape, low.weight, low.eps))
    if keys is not None:
        latent = functional.rms_norm(keys.x[:, :512], (512,), keys.weight, keys.eps)
        found = torch.cat((latent, keys.x[:, 512:]), 1).float()
        found[:, -64:] = rotated_rope(found[:, -64:], *rope)
        _put(keys.rows, keys.slots, *reference.encode(found.bfloat16(), keys.rows.record.name))
    if index is not None:
        x = functional.layer_norm(index.x, (WIDTH,), index.weight, index.bias, index.eps)
        rows = index_records.prepared(x, *rope, index.rotation)
        _put(index.rows, index.slots, *index_records.quantised(rows, index.rows.record))
    if queries is not None:
        q = queries.q
        if queries.eps is not None:
            q = functional.rms_norm(q, (512,), None, queries.eps)
        turned = rotated_rope(q[..., -64:].float(), *(table[:, None] for table in rope))
        queries.out[..., -64:] = turned.bfloat16()
        if queries.eps is not None:
            queries.out[..., :-64] = q[..., :-64]


def _check(arguments: Arguments, _outputs: Any) -> None:
    """Compare with the definition, bit for bit."""
    (given,) = arguments
    rope = tuple(table[given["positions"]] for table in given["rope"])
    if keys := given.get("keys"):
        again = replace(keys.rows, pool=torch.zeros_like(keys.rows.pool))
        found = reference.latent_keys(keys.x, keys.weight, keys.eps, rope)
        _put(again, keys.slots, *reference.encode(found, again.record.name))
        expect_equal(keys.rows.pool, again.pool)
    if index := given.get("index_keys"):
        again = replace(index.rows, pool=torch.zeros_like(index.rows.pool))
        norm = index.weight, index.bias, index.eps
        found = reference.index_keys(index.x, norm, rope, again.record.name, index.rotation)
        _put(again, index.slots, *found)
        expect_equal(index.rows.pool, again.pool)
    if queries := given.get("queries"):
        found = reference.queries(queries.q, rope, queries.eps)
        expect_equal(queries.out[..., -found.shape[-1] :], found)
    if low := given.get("low_rank"):
        expect_equal(low.out, reference.low_rank(low.x, low.weight, low.eps))
