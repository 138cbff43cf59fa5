"""Tuning of decode for shapes that a user names: see `kernelkit.tune.tuner`."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from gqa_lowlatency.api import fields_of
from gqa_lowlatency.choose import TUNED, choices
from gqa_lowlatency.launch import DECODE
from kernelkit.call.tensors import DTYPES
from kernelkit.tune.tuner import Call, Subject


@dataclass(frozen=True)
class Shape:
    """Sizes and options of a decode problem to tune.

    batch: number of entries, each with `keys` keys.
    tokens: query tokens of an entry.
    kv_dtype: dtype of k and v; '' is `dtype`.
    page_size: rows of a page; 0 without pages.
    lens: whether there are kv_lens, as always with pages.
    window: keys that a token sees, 0 for all.
    sinks, pdl: as in `decode`.
    """

    batch: int = 1
    keys: int = 8192
    q_heads: int = 64
    kv_heads: int = 8
    head_dim: int = 128
    tokens: int = 1
    dtype: str = "bf16"
    kv_dtype: str = ""
    page_size: int = 0
    lens: bool = True
    window: int = 0
    sinks: bool = False
    pdl: bool = False


def call(shape: Shape, device: torch.device, arch: str | None = None) -> Call:
    """Return a call of `decode` on random tensors."""
    dtype, batch = DTYPES[shape.dtype], shape.batch
    rows: tuple[int, ...] = (batch, shape.keys)
    options: dict[str, Any] = {"pdl": shape.pdl, "arch": arch}
    if shape.page_size:
        pages = -(-shape.keys // shape.page_size)
        rows = batch * pages, shape.page_size
        table = torch.arange(batch * pages, dtype=torch.int32, device=device)
        options["page_table"] = table.view(batch, pages)
        options["max_kv_len"] = shape.keys
    if shape.lens or shape.page_size:
        options["kv_lens"] = torch.full((batch,), shape.keys, dtype=torch.int32, device=device)
    if shape.window:
        options["window"] = shape.window - 1
    if shape.sinks:
        options["sinks"] = torch.zeros(shape.q_heads, device=device)
    q = torch.randn(batch, shape.tokens, shape.q_heads, shape.head_dim, device=device)
    size = (*rows, shape.kv_heads, shape.head_dim)
    kind = DTYPES[shape.kv_dtype or shape.dtype]
    k, v = (torch.randn(size, dtype=dtype, device=device).to(kind) for _ in range(2))
    return DECODE, fields_of(q.to(dtype), k, v, options)


def draw(order: random.Random) -> Shape:
    """Draw a random shape of a present-day model."""
    q_heads, kv_heads = order.choice(((64, 8), (32, 8), (8, 1), (16, 2), (40, 8), (64, 4)))
    return Shape(
        batch=order.choice((1, 2, 4, 8, 16, 32, 64)),
        keys=round(2 ** order.uniform(7, 15)),
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=order.choice((64, 128, 128)),
    )


KNOWN = tuple(
    Shape(batch, keys, lens=lens)
    for lens, batch, keys in product((True, False), (1, 8, 64), (1024, 8192, 65536))
)
SUBJECT = Subject(TUNED, Shape, call, choices, draw, KNOWN)
