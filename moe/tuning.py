"""What of the grouped GEMM can be tuned, by sizes that a user names: see `kernelkit.tune.tuner`."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

from kernelkit.tune.tuner import Call, Subject
from moe.arguments import SwiGLU
from moe.choose import TUNED, choices
from moe.config import DEFAULT_GRANULARITY
from moe.formats import format_of, row_blocks, scale_blocks, scale_bytes
from moe.launch import GROUPED_GEMM
from moe.quantized import Quantized, of_bytes


def offsets_of(tokens: int, experts: int, top_k: int, device: torch.device) -> torch.Tensor:
    """int32 [experts + 1] of tokens that have `top_k` different experts each, the same for the same
    sizes."""
    if device.type == "meta":
        return torch.empty(experts + 1, dtype=torch.int32, device=device)
    order = torch.Generator().manual_seed(tokens)
    chosen = torch.rand(tokens, experts, generator=order).topk(min(top_k, experts)).indices
    counts = torch.bincount(chosen.flatten(), minlength=experts)
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    return starts.int().to(device)


ONE = {"e4m3": 0x38, "ue8m0": 127}  # a scale factor


@dataclass(frozen=True)
class Shape:
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


def call(shape: Shape, device: torch.device, arch: str | None = None) -> Call:
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


def _quantised(rows: tuple[int, ...], shape: Shape, blocks: int, device: torch.device) -> Quantized:
    form = format_of(shape.fmt)
    size = (*rows, shape.k // form.per_byte)
    data = torch.randint(0, 256, size, dtype=torch.uint8, device=device)
    if form.per_byte == 1:
        data &= 0xB7  # of e4m3: no NaN
    scales = torch.full(
        (scale_bytes(blocks, form.columns(shape.k)),), ONE[form.scale], device=device
    )
    one = torch.ones(rows[0] if len(rows) > 1 else 1, device=device) if form.has_global else None
    return of_bytes(data, scales.to(torch.uint8), shape.fmt, one)


def draw(order: random.Random) -> Shape:
    """Of models of today."""
    experts, top_k, k, columns = order.choice(((256, 8, 7168, 4096), (128, 8, 2048, 1536)))
    tokens = round(2 ** order.uniform(0, 13))
    return Shape(tokens, experts, top_k, k, columns, order.choice(("nvfp4", "mxfp8")))


SUBJECT = Subject(TUNED, Shape, call, choices, draw)
