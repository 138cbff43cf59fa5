"""Tuning of attention to latent keys for shapes that a user names: see `kernelkit.tune.tuner`."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from kernelkit.tune.tuner import Call, Subject
from kvcache.layouts.rows import Rows
from mla.attention import codec
from mla.attention.api import dense_fields, sparse_fields
from mla.attention.formats import FORMS
from mla.attention.launch import DECODE, SPARSE
from mla.attention.measured import TUNED, choices

MOST_ENTRIES = 1 << 17  # of a cache from which tokens list entries


@dataclass(frozen=True)
class Shape:
    """Sizes and options of a problem of `mla.decode`, or with `listed` of `mla.sparse_decode`.

    entries: query entries, each with `keys` keys.
    tokens: query tokens of an entry; 1 if `listed`.
    record: of the cache, such as fp8_584; bf16_576 for `mla.decode`.
    page_size: rows of a page.
    listed: each query entry lists its keys.
    extra: keys that it lists of a second cache, of record `extra_record`.
    many: as in `mla.sparse_prefill`.
    sinks, pdl: as in `mla.decode`.
    """

    entries: int = 1
    keys: int = 4096
    heads: int = 128
    tokens: int = 1
    record: str = "bf16_576"
    page_size: int = 64
    listed: bool = False
    extra: int = 0
    extra_record: str = "fp8_584"
    many: bool = False
    sinks: bool = False
    pdl: bool = False


def call(shape: Shape, device: torch.device, arch: str | None = None) -> Call:
    """Return a call on random tensors. ValueError for options that exclude each other."""
    options: dict[str, Any] = {"pdl": shape.pdl, "arch": arch}
    if shape.sinks:
        options["sinks"] = torch.zeros(shape.heads, dtype=torch.float32, device=device)
    columns = FORMS[shape.record].columns
    size = (shape.entries, shape.tokens, shape.heads, columns)
    q = torch.randn(size, dtype=torch.bfloat16, device=device)
    if shape.listed:
        return _listed(shape, q, options)
    if shape.record != "bf16_576" or shape.extra or shape.many:
        raise ValueError("without listed=true the record is bf16_576, without extra and many")
    pages = -(-shape.keys // shape.page_size)
    store = (shape.entries * pages, shape.page_size, columns)
    kv = torch.randn(store, dtype=torch.bfloat16, device=device)
    table = torch.arange(len(kv), dtype=torch.int32, device=device).view(shape.entries, pages)
    lens = torch.full((shape.entries,), shape.keys, dtype=torch.int32, device=device)
    options |= {"page_table": table, "kv_lens": lens, "max_kv_len": shape.keys}
    return DECODE, dense_fields(q, kv, options)


def _listed(shape: Shape, q: torch.Tensor, options: dict[str, Any]) -> Call:
    if shape.tokens != 1:
        raise ValueError(f"tokens={shape.tokens} with listed=true: each entry is one token")
    rows, indices = _cache(shape, shape.record, shape.keys, q.device)
    if shape.extra:
        extra, places = _cache(shape, shape.extra_record, shape.extra, q.device)
        options |= {"extra": extra, "extra_indices": places}
    return SPARSE, sparse_fields(q[:, 0], rows, indices, options) | {"many": shape.many}


def _cache(shape: Shape, record: str, keys: int, device: torch.device) -> tuple[Rows, torch.Tensor]:
    """Return a cache whose pages are alike, and the entries that each query lists of it."""
    pages = -(-min(shape.entries * keys, MOST_ENTRIES) // shape.page_size)
    values = torch.randn(1, shape.page_size, FORMS[record].columns).bfloat16()
    page = codec.pack(values, record)
    rows = replace(page, pool=page.pool.to(device).repeat(pages, 1))
    size = (shape.entries, keys)
    return rows, torch.randint(rows.entries, size, dtype=torch.int32, device=device)


def draw(order: random.Random) -> Shape:
    """Draw a random shape of a present-day model."""
    heads, entries = order.choice((16, 64, 128)), order.choice((1, 2, 4, 8, 16, 32, 64))
    if order.random() < 0.5:
        return Shape(entries, round(2 ** order.uniform(9, 15)), heads)
    record, keys, extra = order.choice((("fp8_656", 2048, 0), ("fp8_584", 512, 128)))
    return Shape(entries, keys, heads, record=record, listed=True, extra=extra)


KNOWN = (
    *(Shape(entries, keys, heads)
      for heads, entries, keys in product((128, 16), (1, 8, 32), (4096, 16384))),
    *(Shape(tokens, 512, heads, record="fp8_584", listed=True, extra=128)
      for heads, tokens in product((128, 64), (1, 8, 32, 128))),
)  # fmt: skip
SUBJECT = Subject(TUNED, Shape, call, choices, draw, KNOWN)
