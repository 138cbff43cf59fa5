"""Tunable grouped products, by sizes that a user names: see `kernelkit.tune.tuner`."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

import torch

from kernelkit.tune.tuner import Call, Subject
from moe.arguments import SwiGLU
from moe.choose import TUNED, choices
from moe.config import DEFAULT_GRANULARITY
from moe.formats import format_of, row_blocks, scale_blocks, scale_bytes
from moe.launch import GROUPED_GEMM
from moe.mixed.choose import TUNED as MIXED_TUNED
from moe.mixed.choose import choices as choices_of_mixed
from moe.mixed.config import DEPTH, ROWS
from moe.mixed.fragments import PAIR_ROWS, Fragments, unit_bytes, units_of
from moe.mixed.launch import MIXED_GEMM, MixedArguments
from moe.quantized import Quantized, of_bytes


def offsets_of(tokens: int, experts: int, top_k: int, device: torch.device) -> torch.Tensor:
    """Return int32 [experts + 1] for tokens with `top_k` different experts each; equal for equal
    sizes."""
    if device.type == "meta":
        return torch.empty(experts + 1, dtype=torch.int32, device=device)
    order = torch.Generator().manual_seed(tokens)
    scores = torch.rand(tokens, experts, dtype=torch.float32, generator=order)
    chosen = scores.topk(min(top_k, experts)).indices
    counts = torch.bincount(chosen.flatten(), minlength=experts)
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    return starts.int().to(device)


ONE = {"e4m3": 0x38, "ue8m0": 127}  # code of a scale factor of 1


@dataclass(frozen=True)
class GroupedProduct:
    """A product of `moe.fused_moe` with packed experts: tokens x top_k rows of K elements, and
    `columns` rows of the weights of each expert. swiglu: they are gate and up, as in the first
    product, whose output is a bfloat16 here."""

    tokens: int = 256
    experts: int = 128
    top_k: int = 8
    k: int = 4096
    columns: int = 4096
    fmt: str = "nvfp4"
    swiglu: bool = False


def call_grouped(shape: GroupedProduct, device: torch.device, arch: str | None = None) -> Call:
    """A call of `grouped_gemm` on random elements, with scale factors of 1."""
    rows = shape.tokens * min(shape.top_k, shape.experts)
    blocks = scale_blocks(rows, shape.experts), shape.experts * row_blocks(shape.columns)
    given: dict[str, Any] = {
        "x": _quantised((rows,), shape, blocks[0], device),
        "w": _quantised((shape.experts, shape.columns), shape, blocks[1], device),
        "offsets": offsets_of(shape.tokens, shape.experts, shape.top_k, device),
        "most_rows": shape.tokens, "pdl": True, "arch": arch,
    }  # fmt: skip
    if shape.swiglu:
        given["activation"] = SwiGLU().of_rows(DEFAULT_GRANULARITY)
    return GROUPED_GEMM, given


def _quantised(
    rows: tuple[int, ...], shape: GroupedProduct, blocks: int, device: torch.device
) -> Quantized:
    form = format_of(shape.fmt)
    size = (*rows, shape.k // form.per_byte)
    data = torch.randint(0, 256, size, dtype=torch.uint8, device=device)
    if form.per_byte == 1:
        data &= 0xB7  # e4m3 without NaN
    scales = torch.full(
        (scale_bytes(blocks, form.columns(shape.k)),), ONE[form.scale], device=device
    )
    count = rows[0] if len(rows) > 1 else 1
    one = torch.ones(count, dtype=torch.float32, device=device) if form.has_global else None
    return of_bytes(data, scales.to(torch.uint8), shape.fmt, one)


def draw_grouped(order: random.Random) -> GroupedProduct:
    """Draw a product with sizes of current models."""
    experts, top_k, k, columns = order.choice(((256, 8, 7168, 4096), (128, 8, 2048, 1536)))
    tokens = round(2 ** order.uniform(0, 13))
    return GroupedProduct(tokens, experts, top_k, k, columns, order.choice(("nvfp4", "mxfp8")))


GROUPED = Subject(TUNED, GroupedProduct, call_grouped, choices, draw_grouped)


@dataclass(frozen=True)
class MixedProduct:
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


def call_mixed(shape: MixedProduct, device: torch.device, arch: str | None = None) -> Call:
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
        gathering: dict[str, Any] = {"rows": rows, "slots": min(shape.top_k, shape.experts)}
        arguments = MixedArguments(x, w, offsets, activation=form, **gathering, **options)
        if not arguments.gathers:
            x = torch.randn(count, shape.hidden, dtype=torch.bfloat16, device=device)
            arguments = replace(arguments, x=x, rows=None, slots=1)
    if shape.bias:
        bias = torch.zeros(shape.experts, w.rows, dtype=torch.float32, device=device)
        arguments = replace(arguments, bias=bias)
    given = {item.name: getattr(arguments, item.name) for item in fields(arguments)}
    return MIXED_GEMM, {name: value for name, value in given.items() if value is not None}


def _fragments(shape: MixedProduct, rows: int, k: int, device: torch.device) -> Fragments:
    """Weights of random elements, whose scale factors are of moderate size."""
    nbytes = units_of(rows, ROWS) * units_of(k, DEPTH) * unit_bytes(shape.fmt)
    data = torch.randint(112, 120, (shape.experts, nbytes), dtype=torch.uint8, device=device)
    factor = torch.ones(shape.experts, dtype=torch.float32, device=device)
    return Fragments(data, factor, rows, k, shape.fmt, swiglu=not shape.second)


def draw_mixed(order: random.Random) -> MixedProduct:
    """Draw a product with sizes of current models."""
    sizes = ((128, 4, 2880, 2880), (32, 4, 2880, 2880), (128, 8, 2048, 768), (8, 2, 4096, 14336))
    experts, top_k, hidden, intermediate = order.choice(sizes)
    return MixedProduct(
        tokens=round(2 ** order.uniform(0, 13)),
        experts=experts,
        top_k=top_k,
        hidden=hidden,
        intermediate=intermediate,
        second=order.random() < 0.5,
    )


# gpt-oss-20b and -120b.
KNOWN = tuple(
    MixedProduct(tokens, experts, second=second, bias=True, limit=7.0)
    for experts, second in product((32, 128), (False, True))
    for tokens in (1, 8, 32, 64, 2048, 8192)
)
MIXED = Subject(MIXED_TUNED, MixedProduct, call_mixed, choices_of_mixed, draw_mixed, KNOWN)
