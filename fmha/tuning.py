"""Tuning of attention for shapes that a user names: see `kernelkit.tune.tuner`."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from fmha.api import fields_of
from fmha.choose import TUNED, choices
from fmha.launch import ATTENTION
from kernelkit.call.tensors import DTYPES
from kernelkit.tune.tuner import Call, Subject


@dataclass(frozen=True)
class Shape:
    """Sizes and options of an attention problem to tune.

    batch: number of entries, each with `queries` and `keys`.
    v_head_dim: columns of V; 0 is head_dim.
    window: keys that a query sees to its left, itself included; 0 for all.
    packed: whether q, k and v hold the tokens of all entries in sequence, with cu_seqlens.
    """

    batch: int = 1
    queries: int = 4096
    keys: int = 4096
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    v_head_dim: int = 0
    causal: bool = True
    window: int = 0
    dtype: str = "bf16"
    sinks: bool = False
    packed: bool = False


def call(shape: Shape, device: torch.device, arch: str | None = None) -> Call:
    """Return a call of `attention` on random tensors."""
    dtype = DTYPES[shape.dtype]
    options: dict[str, Any] = {"causal": shape.causal, "arch": arch}
    entries: tuple[tuple[int, ...], tuple[int, ...]]
    entries = (shape.batch, shape.queries), (shape.batch, shape.keys)
    if shape.packed:
        entries = (shape.batch * shape.queries,), (shape.batch * shape.keys,)
        for name, length in (("cu_seqlens_q", shape.queries), ("cu_seqlens_k", shape.keys)):
            starts = torch.arange(shape.batch + 1, dtype=torch.int32, device=device)
            options[name] = starts * length
        options["max_seqlen_q"] = shape.queries
    if shape.window:
        options["window"] = shape.window - 1
    if shape.sinks:
        options["sinks"] = torch.zeros(shape.q_heads, device=device)
    heads = (shape.q_heads, shape.head_dim), (shape.kv_heads, shape.head_dim)
    v_heads = shape.kv_heads, shape.v_head_dim or shape.head_dim
    sizes = (*entries[0], *heads[0]), (*entries[1], *heads[1]), (*entries[1], *v_heads)
    q, k, v = (torch.randn(size, dtype=torch.bfloat16, device=device).to(dtype) for size in sizes)
    return ATTENTION, fields_of(q, k, v, options)


def draw(order: random.Random) -> Shape:
    """Draw a random shape of a present-day model."""
    q_heads, kv_heads = order.choice(((32, 8), (16, 16), (64, 8), (16, 2)))
    tokens = round(2 ** order.uniform(7, 13))
    return Shape(
        batch=order.choice((1, 1, 2, 4, 8)),
        queries=tokens,
        keys=tokens,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=order.choice((64, 128, 128, 256)),
        causal=order.random() < 0.7,
    )


_GPT_OSS: dict[str, Any] = {"q_heads": 64, "kv_heads": 8, "head_dim": 64, "sinks": True}
KNOWN = (
    *(
        Shape(batch, tokens, tokens, 2048 // head_dim, 2048 // head_dim, head_dim, causal=causal)
        for head_dim, causal in product((64, 128, 256), (False, True))
        for batch, tokens in ((4, 4096), (2, 8192))
    ),
    *(Shape(1, n, n, window=window, **_GPT_OSS) for n in (2048, 8192) for window in (0, 128)),
    Shape(1, 8192, 8192, 64, 8, 128),
)
SUBJECT = Subject(TUNED, Shape, call, choices, draw, KNOWN)
