"""Attention in plain torch: the definition, and the definition with the kernel's roundings.

`definition` evaluates O = softmax(scale Q K^T + mask) V in fp64. `rounded` rounds where the
kernel rounds (scores and sums in fp32, P in the io dtype, O in the output dtype) and nowhere
else; the distance between the two is what the kernel is allowed to be wrong by
(`kernelkit.tolerance`). Neither knows of tiles, so neither can share a tiling bug.

Layouts: q [B, Sq, Hq, D]; k, v [B, Skv, Hkv, D]; Hq % Hkv == 0. O [B, Sq, Hq, D];
LSE and row_max [B, Hq, Sq], natural-log units. A row that sees no key: O = 0, both -inf.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Attention:
    """o: normalised output; lse: ln sum exp(scale q.k); row_max: max of scale q.k."""

    o: torch.Tensor
    lse: torch.Tensor
    row_max: torch.Tensor


def definition(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    kv_lens: Sequence[int] | torch.Tensor | None = None,
) -> Attention:
    """The fp64 definition."""
    return _attention(q, k, v, (causal, scale, kv_lens), None)


def rounded(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    kv_lens: Sequence[int] | torch.Tensor | None = None,
) -> Attention:
    """The same with the rounding points of the kernel, for q.dtype inputs and outputs."""
    return _attention(q, k, v, (causal, scale, kv_lens), q.dtype)


def visible_keys(sq: int, skv: int, kv_len: int, causal: bool) -> torch.Tensor:
    """bool [Sq, Skv]: key c is visible to query r; causal is aligned bottom-right."""
    row = torch.arange(sq)[:, None]
    key = torch.arange(skv)[None, :]
    visible = (key < kv_len).expand(sq, skv)
    return visible & (key <= row + (kv_len - sq)) if causal else visible


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: tuple, io: torch.dtype | None
) -> Attention:
    causal, scale, kv_lens = options
    batch, sq, q_heads, head_dim = q.shape
    skv, kv_heads = k.shape[1], k.shape[2]
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    lens = [skv] * batch if kv_lens is None else [int(n) for n in kv_lens]
    wide = torch.float64 if io is None else torch.float32
    parts = []
    for b in range(batch):
        visible = visible_keys(sq, skv, lens[b], causal)
        # Rows past the length may hold anything, NaN included: they are not part of the problem.
        past = (torch.arange(skv) >= lens[b])[:, None, None]
        keys = k[b].masked_fill(past, 0).to(wide).repeat_interleave(q_heads // kv_heads, dim=1)
        values = v[b].masked_fill(past, 0).to(wide).repeat_interleave(q_heads // kv_heads, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[b].to(wide), keys)
        parts.append(_softmax_times_v(scores, visible, values, scale, io))
    o, lse, row_max = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
    return Attention(o, lse, row_max)


def _softmax_times_v(
    scores: torch.Tensor,
    visible: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    io: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """scores [H, Sq, Skv], visible [Sq, Skv], values [Skv, H, D] -> o [Sq, H, D], lse, row_max."""
    if scores.shape[-1] == 0:
        empty = scores.new_full(scores.shape[:2], -math.inf)
        return values.new_zeros(scores.shape[1], scores.shape[0], values.shape[2]), empty, empty
    scores = scores.masked_fill(~visible, -math.inf)
    top = scores.amax(dim=-1)
    # In a row without visible keys (-inf) - (-inf) would be NaN: any finite maximum gives P = 0.
    shift = top.masked_fill(top == -math.inf, 0.0)
    weights = torch.exp2((scores - shift[..., None]) * (scale * math.log2(math.e)))
    weights = weights.masked_fill(~visible, 0.0)
    total = weights.sum(dim=-1)
    operand = weights if io is None else weights.to(io).to(weights.dtype)
    product = torch.einsum("hqk,khd->qhd", operand, values)
    divisor = total.masked_fill(total == 0, 1.0)
    o = product / divisor.T[..., None]
    lse = torch.log(total) + shift * scale
    return (o if io is None else o.to(io)), lse, top * scale
