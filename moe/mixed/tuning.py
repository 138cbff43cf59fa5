"""What of the mixed product can be tuned, by layers that a user names: see
`kernelkit.tune.tuner`."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

import torch

from kernelkit.tune.tuner import Call, Subject
from moe.arguments import SwiGLU
from moe.mixed.choose import TUNED, choices
from moe.mixed.config import DEPTH, ROWS
from moe.mixed.fragments import PAIR_ROWS, Fragments, unit_bytes, units_of
from moe.mixed.launch import MIXED_GEMM, MixedArguments
from moe.tuning import offsets_of


@dataclass(frozen=True)
class Shape:
    """A layer of `moe.fused_moe` with arranged experts in bf16. second: its second product instead
    of the first one. limit: of SwiGLU, 0 for none. Each token has top_k of the experts, drawn
    evenly."""

    tokens: int = 1
    experts: int = 128
    top_k: int = 4
    hidden: int = 2880
    intermediate: int = 2880
    second: bool = False
    fmt: str = "mxfp4"
    bias: bool = False
    limit: float = 0.0


def call(shape: Shape, device: torch.device, arch: str | None = None) -> Call:
    """The product as the layer calls it, on weights of random bytes."""
    count = shape.tokens * min(shape.top_k, shape.experts)
    offsets = offsets_of(shape.tokens, shape.experts, shape.top_k, device)
    options: dict[str, Any] = {"most_rows": shape.tokens, "pdl": True, "arch": arch}
    if shape.second:
        w = _fragments(shape, shape.hidden, shape.intermediate, device)
        x = torch.randn(count, shape.intermediate, dtype=torch.bfloat16, device=device)
        arguments = MixedArguments(x, w, offsets, **options)
    else:
        w = _fragments(shape, 2 * shape.intermediate, shape.hidden, device)
        x = torch.randn(shape.tokens, shape.hidden, dtype=torch.bfloat16, device=device)
        rows = torch.arange(count, dtype=torch.int32, device=device)
        form = SwiGLU(limit=shape.limit or None).of_rows(PAIR_ROWS)
        gathering = {"rows": rows, "slots": min(shape.top_k, shape.experts)}
        arguments = MixedArguments(x, w, offsets, activation=form, **gathering, **options)
        if not arguments.gathers:
            x = torch.randn(count, shape.hidden, dtype=torch.bfloat16, device=device)
            arguments = replace(arguments, x=x, rows=None, slots=1)
    if shape.bias:
        arguments = replace(arguments, bias=torch.zeros(shape.experts, w.rows, device=device))
    given = {item.name: getattr(arguments, item.name) for item in fields(arguments)}
    return MIXED_GEMM, {name: value for name, value in given.items() if value is not None}


def _fragments(shape: Shape, rows: int, k: int, device: torch.device) -> Fragments:
    """Weights of random elements, whose scale factors are of moderate size."""
    nbytes = units_of(rows, ROWS) * units_of(k, DEPTH) * unit_bytes(shape.fmt)
    data = torch.randint(112, 120, (shape.experts, nbytes), dtype=torch.uint8, device=device)
    factor = torch.ones(shape.experts, device=device)
    return Fragments(data, factor, rows, k, shape.fmt, swiglu=not shape.second)


def draw(order: random.Random) -> Shape:
    """Of models of today."""
    sizes = ((128, 4, 2880, 2880), (32, 4, 2880, 2880), (128, 8, 2048, 768), (8, 2, 4096, 14336))
    experts, top_k, hidden, intermediate = order.choice(sizes)
    return Shape(
        tokens=round(2 ** order.uniform(0, 13)),
        experts=experts,
        top_k=top_k,
        hidden=hidden,
        intermediate=intermediate,
        second=order.random() < 0.5,
    )


# gpt-oss-20b and -120b.
KNOWN = tuple(
    Shape(tokens, experts, second=second, bias=True, limit=7.0)
    for experts, second in product((32, 128), (False, True))
    for tokens in (1, 8, 32, 64, 2048, 8192)
)
SUBJECT = Subject(TUNED, Shape, call, choices, draw, KNOWN)
