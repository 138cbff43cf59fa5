"""Softmax attention in fp64: the one definition that all attention kernels are compared with.

`attend` takes the keys of one sequence and says nothing of pages, batches or tiles. The references
of `fmha` and `gqa_lowlatency` find the keys of each entry and call it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Numbers:
    """Factors of scores and values.

    scale: None is 1 / sqrt(head_dim)
    softcap: c of c tanh(score / c); 0 for none
    q_scale: a number or [Hq], any sign
    k_scale, v_scale: a number or [Hkv], any sign
    sinks: [Hq], logits of a key whose value is 0
    """

    scale: float | None = None
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    q_scale: float | torch.Tensor | None = None
    k_scale: float | torch.Tensor | None = None
    v_scale: float | torch.Tensor | None = None


@dataclass(frozen=True)
class Attended:
    """o [rows, Hq, Dv]; lse and row_max [Hq, rows] in natural-log units, the sink's included."""

    o: torch.Tensor
    lse: torch.Tensor
    row_max: torch.Tensor


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    numbers: Numbers,
    change: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Attended:
    """Softmax attention of query rows [rows, Hq, D] to keys [keys, Hkv, D], v [keys, Hkv, Dv].

    visible: bool [rows, keys] or [Hq, rows, keys].
    change: function of all scores [Hq, rows, keys], after scale and softcap.

    Query head h reads KV head h // (Hq // Hkv). Keys that no row sees may hold anything, NaN too. A
    row that sees no key: O = 0, LSE = row_max = -inf, or the sink.

    The factor of a score is scale q_scale k_scale. 0 gives equal weights to all visible keys, a
    negative one negates the scores. Kernels keep its magnitude in [2^-100, 2^80] in log2 units,
    and sinks in the range of fp32 in them: that changes no O, only an LSE beyond +-2^64.
    """
    (rows, q_heads, head_dim), (keys, kv_heads, _) = q.shape, k.shape
    grouped = (kv_heads, q_heads // kv_heads * rows)
    anyone = visible.flatten(0, -2).any(dim=0)[:, None]
    queries = q.double().transpose(0, 1).reshape(*grouped, head_dim)
    columns = k.double().transpose(0, 1).masked_fill(~anyone, 0.0)
    values = v.double().transpose(0, 1).masked_fill(~anyone, 0.0)
    products = (queries @ columns.transpose(1, 2)).reshape(q_heads, rows, keys)
    logits = _logits(products, head_dim, numbers)
    if change is not None:
        logits = change(logits)
    logits = logits.masked_fill(~visible, -math.inf)
    top = logits.new_full((q_heads, rows), -math.inf)
    if keys:
        top = logits.amax(dim=-1)
    if numbers.sinks is not None:
        sinks = numbers.sinks.to(q.device).double()[:, None]
        top = torch.maximum(top, sinks)
    base = top.masked_fill(top == -math.inf, 0.0)
    weights = torch.exp(logits - base[..., None])
    total = weights.sum(dim=-1)
    if numbers.sinks is not None:
        total = total + torch.exp(sinks - base)
    o = (weights.reshape(*grouped, keys) @ values).reshape(q_heads, rows, v.shape[-1])
    o = o / total.masked_fill(total == 0, 1.0)[..., None] * of_heads(o, numbers.v_scale)
    return Attended(o.transpose(0, 1), torch.log(total) + base, top)


def of_heads(numbers: torch.Tensor, scale: float | torch.Tensor | None) -> torch.Tensor | float:
    """A scale of all heads or of each, as a factor for `numbers` [Hq, ..] in their dtype."""
    if not isinstance(scale, torch.Tensor):
        return 1.0 if scale is None else scale
    each = scale.to(numbers).reshape(-1)
    return each.repeat_interleave(numbers.shape[0] // len(each))[:, None, None]


def divided(o: torch.Tensor, scale: float | torch.Tensor | None) -> torch.Tensor:
    """Divide O by an out_scale, a number or [1]."""
    if scale is None:
        return o
    return o / (scale.to(o) if isinstance(scale, torch.Tensor) else scale)


def saturated(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round to `dtype`. e4m3 has no infinity: too large numbers become +-448, NaN stays NaN."""
    if dtype == torch.float8_e4m3fn:
        most = torch.finfo(dtype).max
        numbers = numbers.clamp(-most, most)
    return numbers.to(dtype)


def _logits(products: torch.Tensor, head_dim: int, numbers: Numbers) -> torch.Tensor:
    """Scores [Hq, rows, keys] of q.k."""
    scale = 1.0 / math.sqrt(head_dim) if numbers.scale is None else numbers.scale
    factor = scale * of_heads(products, numbers.q_scale) * of_heads(products, numbers.k_scale)
    if numbers.softcap:
        return numbers.softcap * torch.tanh(products * (factor / numbers.softcap))
    return products * factor


def branches(tree: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (bool [tokens, tokens], int64 [tokens, 1]) of words [tokens]: which tokens each one
    sees, and its depth, the number of earlier ones among them."""
    sees = (tree[:, None] >> torch.arange(tokens, device=tree.device) & 1).bool()
    return sees, sees.tril(-1).sum(dim=1, keepdim=True)
