"""Decode attention in plain torch: the definition, and the definition with the kernel's roundings.

`definition` evaluates everything that `gqa_lowlatency.decode` can do in fp64, the softmax itself by
`kernelkit.numerics.definition`. `rounded` rounds where the kernel rounds (scores and sums in fp32,
P in the dtype of its product, O in the output dtype; where a sink leaves a subnormal share of a
row, it is 0) and nowhere else. The distance between the two is the kernel's tolerance
(`kernelkit.numerics.tolerance`). Neither has tiles or clusters, so neither shares a bug with them.

e4m3 keys: on sm_90a, and on GPUs of mma.sync alone, they become 16 bits wide, exactly, and P is
rounded to fp16. On sm_100a the products are of e4m3: each row of Q is scaled to 448 and rounded,
and P is with a bias of 2^8.

q [B, T, Hq, D] or [B, Hq, D]; k, v [B, S, Hkv, D] or pages [P, page_size, Hkv, D]. O like q, LSE
[B, Hq, T] or [B, Hq], natural log. What no token sees is never used, NaN or not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from kernelkit.compile.arch import written_for
from kernelkit.numerics.definition import Numbers, attend, branches, divided, of_heads, saturated
from kernelkit.plan.log2 import LOG2_E, MAX_FACTOR, MIN_FACTOR

E4M3 = torch.float8_e4m3fn
P_BIAS = 2.0**8  # factor of P in e4m3, whose largest number is 448
SMALLEST_TOP = 2.0**-100  # maximum of a row of Q in e4m3 below which the row counts as zeros


@dataclass(frozen=True)
class Options:
    """Keyword arguments of `gqa_lowlatency.decode` that change its result, and arch, which
    determines the roundings.

    out_scale: divisor of O before its last rounding; `definition` does not saturate.
    """

    kv_lens: Sequence[int] | torch.Tensor | None = None
    first_keys: Sequence[int] | torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    causal: bool = True
    tree: torch.Tensor | None = None
    window: int | None = None
    sink_tokens: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    scale: float | None = None
    k_scale: float | torch.Tensor | None = None
    v_scale: float | torch.Tensor | None = None
    out_dtype: torch.dtype | None = None
    out_scale: float | torch.Tensor | None = None
    arch: str = "sm_90a"


@dataclass(frozen=True)
class Decoded:
    """Results of the reference.

    o: output.
    lse: ln of the sum of exp(score), including the sink.
    """

    o: torch.Tensor
    lse: torch.Tensor


def definition(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Decoded:
    """Compute the fp64 definition; `options` are the fields of `Options`."""
    return _decode(q, k, v, Options(**options), exact=True)


def rounded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Decoded:
    """Compute decode with the rounding points of the kernel."""
    return _decode(q, k, v, Options(**options), exact=False)


def visible_keys(
    tokens: int, n_keys: int, options: Options, tree: torch.Tensor | None = None
) -> torch.Tensor:
    """Return bool [tokens, n_keys]: whether each token sees each key. tree: words [tokens]."""
    start = n_keys - tokens
    position = torch.arange(start, n_keys)[:, None]
    key = torch.arange(n_keys)[None, :]
    seen = (key <= position) if options.causal else torch.ones(tokens, n_keys, dtype=torch.bool)
    if tree is not None:
        sees, depth = branches(tree.cpu(), tokens)
        position = start + depth
        seen = torch.ones(tokens, n_keys, dtype=torch.bool)
        seen[:, max(start, 0) :] = sees[:, max(-start, 0) :]
    if options.window is not None:
        seen = seen & ((key >= position - options.window) | (key < options.sink_tokens))
    return seen


def _decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, *, exact: bool
) -> Decoded:
    if q.ndim == 3:
        one = _decode(q[:, None], k, v, options, exact=exact)
        return Decoded(one.o[:, 0], one.lse[..., 0])
    wide = torch.float64 if exact else torch.float32
    batch, tokens, heads, _ = q.shape
    o = torch.zeros(q.shape, dtype=wide, device=q.device)
    lse = torch.zeros(batch, heads, tokens, dtype=wide, device=q.device)
    for entry in range(batch):
        keys, values = (_rows(cache, entry, options) for cache in (k, v))
        first = 0 if options.first_keys is None else int(options.first_keys[entry])
        words = None if options.tree is None else options.tree[entry].reshape(tokens)
        seen = visible_keys(tokens, len(keys), options, words)
        seen[:, :first] = False
        attended = (_exact if exact else _rounded)(q[entry], keys, values, seen, options)
        o[entry], lse[entry] = attended
    o = divided(o, options.out_scale)
    return Decoded(o if exact else saturated(o, options.out_dtype or q.dtype), lse)


def _rows(cache: torch.Tensor, entry: int, options: Options) -> torch.Tensor:
    """The keys or values of an entry, [n_keys, Hkv, D]."""
    length = None if options.kv_lens is None else int(options.kv_lens[entry])
    if options.page_table is None:
        return cache[entry, :length]
    assert length is not None  # a page table comes with kv_lens
    pages = options.page_table[entry, : -(-length // cache.shape[1])].long()
    used = pages.clamp(0, len(cache) - 1)  # the entry of an unseen page may be invalid
    return cache[used].flatten(0, 1)[:length]


def _exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, options: Options
) -> tuple[torch.Tensor, torch.Tensor]:
    """o [T, Hq, D], lse [Hq, T]; seen: bool [T, n_keys]."""
    names = (each.name for each in fields(Numbers) if hasattr(options, each.name))
    numbers = Numbers(**{name: getattr(options, name) for name in names})
    exact = attend(q, k, v, seen.to(q.device), numbers)
    return exact.o, exact.lse


def _rounded(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, options: Options
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (o before its last rounding, LSE), with the rounding points of the kernel."""
    narrow = k.dtype == E4M3 and written_for(options.arch) == "sm_100a"
    products = (E4M3 if narrow else torch.float16) if k.dtype == E4M3 else q.dtype
    (_, heads, _), (n_keys, kv_heads, _) = q.shape, k.shape
    group = heads // kv_heads
    visible = seen.to(q.device)
    anyone = visible.any(dim=0)[:, None, None]
    # Keys that no token sees may be anything, even NaN.
    keys, values = (
        tensor.float().masked_fill(~anyone, 0.0).repeat_interleave(group, dim=1)
        for tensor in (k, v)
    )
    queries = _quantised(q) if narrow else q.float()
    products_qk = torch.einsum("thd,nhd->htn", queries, keys)
    scores = _capped(products_qk, q.shape[-1], options).masked_fill(~visible, -math.inf)
    top = scores.amax(-1) if n_keys else scores.new_full((heads, len(q)), -math.inf)
    of_keys = top
    if options.sinks is not None:
        top = torch.maximum(top, options.sinks.to(scores)[:, None])
    base = top.masked_fill(top == -math.inf, 0.0)
    weights = torch.exp(scores - base[..., None])
    # ex2.approx.ftz has no subnormal results
    lost = torch.exp(of_keys - base) < torch.finfo(scores.dtype).tiny
    weights = weights.masked_fill(lost[..., None], 0.0)
    total = weights.sum(-1)
    if options.sinks is not None:
        total = total + torch.exp(options.sinks.to(scores)[:, None] - base)
    weights = _rounded_weights(weights, products)
    o = torch.einsum("htn,nhd->htd", weights, values)
    o = o / total.masked_fill(total == 0, 1.0)[..., None] * of_heads(o, options.v_scale)
    return o.transpose(0, 1), torch.log(total) + base


def _quantised(q: torch.Tensor) -> torch.Tensor:
    """Return rows of Q as e4m3 times a scale for each row.

    Rows are multiplied by 448 / top in fp32, as in the kernel, and not divided by top / 448. For
    some tops products lie half-way between two e4m3 values (49 / 16 is such a top). The last bit of
    the factor then decides the rounding of all of them in one direction, and the LSE of a row
    visibly moves.
    """
    top, largest = q.float().abs().amax(-1, keepdim=True), torch.finfo(E4M3).max
    factor = (largest * top.reciprocal()).masked_fill(top <= SMALLEST_TOP, 0.0)
    return (q.float() * factor).to(E4M3).float() * (top / largest)


def _rounded_weights(weights: torch.Tensor, products: torch.dtype) -> torch.Tensor:
    bias = P_BIAS if products == E4M3 else 1.0
    return (weights * bias).to(products).to(weights.dtype) / bias


def _capped(scores: torch.Tensor, head_dim: int, options: Options) -> torch.Tensor:
    """Return the logits of the products q.k. A factor too large for fp32 is applied in fp64."""
    scale = 1.0 / math.sqrt(head_dim) if options.scale is None else options.scale
    factor = scale * of_heads(scores.double(), options.k_scale)
    if options.softcap:
        return options.softcap * torch.tanh((scores * (factor / options.softcap)).to(scores))
    if options.k_scale is None:
        return scores * scale
    one = torch.ones((), dtype=torch.float64, device=scores.device)
    factor = one * factor
    least, most = MIN_FACTOR / LOG2_E, MAX_FACTOR / LOG2_E
    return scores * (torch.where(factor < 0, -1.0, 1.0) * factor.abs().clamp(least, most)).float()
