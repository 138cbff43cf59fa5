"""Attention in plain torch: the definition, and the definition with the kernel's roundings.

`definition` evaluates everything that `fmha.attention` can do in fp64, the softmax itself by
`kernelkit.numerics.definition`. `rounded` rounds where the kernel rounds (scores, softcap and sums
in fp32, P in the dtype of K and V, O in the output dtype; where a sink leaves so little of a row
that its share may be subnormal beside a maximum that lags, it is 0) and nowhere else; the distance
between the two is what the kernel is allowed to be wrong by (`kernelkit.numerics.tolerance`).
Neither knows of tiles, so neither can share a tiling bug. Products are summed in fp32, as the
emulator does it unless it is asked for aligned sums, or as a GPU does it
(`kernelkit.numerics.aligned_sums`). Where K and V are e4m3, a row of Q is two terms of it, and P
has few bits and a small range: there each row of `rounded` refers to a maximum that lags by another
share of what it may lag by.

Rows are computed some at a time, so that memory grows with a row and not with Sq x Skv: on a GPU,
too, where the tensors of the problem may be.

Layouts: q [B, Sq, Hq, D] or [T, Hq, D]; k [B, Skv, Hkv, D] and v [B, Skv, Hkv, Dv], or
[Tk, Hkv, ...], or pages [P, page_size, Hkv, ...]; Hq % Hkv == 0. O like q with Dv columns;
LSE and row_max [B, Hq, Sq] or [Hq, T], natural-log units. What no query sees (tails, pages that no
table names, NaN or not) is never read. A row that sees no key: O = 0, LSE = row_max = -inf.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from fmha.blocks import BlockLists, seen_blocks
from fmha.config import FP8_RESCALE_LOG2, MAX_FP8_LOG2, MAX_RESCALE_LOG2
from kernelkit.numerics.aligned_sums import aligned_product
from kernelkit.numerics.definition import Numbers, attend, branches, divided, of_heads, saturated
from kernelkit.plan.log2 import LOG2_E, MAX_FACTOR, MIN_FACTOR

E4M3 = torch.float8_e4m3fn
FP8_KEYS = 128  # most keys whose P V is summed in few bits before it is added to O in fp32
GOLDEN = (math.sqrt(5) - 1) / 2  # multiples of it modulo 1 are spread evenly
Ints = Sequence[int] | torch.Tensor
AT_ONCE = {"cpu": 1 << 25, "cuda": 1 << 28}  # most scores of all heads in memory at once


@dataclass(frozen=True)
class Options:
    """The keyword arguments of `fmha.attention` that change its result.

    q_offset: position of the first query among the keys; None aligns the last query with the last
        key.
    q_scale, k_scale, v_scale: fp32 [1] or one for each head.
    rope: (cos, sin), each [positions, rope_dim / 2]; positions outside are clamped.
    out_dtype: None is q.dtype, bf16 if q is e4m3, or fp32 for raw O (normalize False), whose sums
        leave the range of fp16. A raw O in fp16 has infinities, which `rounded` reproduces.
    mask_mod, score_mod: functions of tensors that broadcast to [Hq, rows, keys].
    out_scale: divisor of O before its last rounding, of any dtype; `definition` does not saturate.
    aligned_sums: not an argument of attention. `rounded` then sums both products as tensor cores
        do, for comparison with results of a GPU.
    phase: not an argument of attention. From 0 to 1, shift of the fractions by which maxima lag.
    """

    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    sink_tokens: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    scale: float | None = None
    q_scale: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    out_scale: float | torch.Tensor | None = None
    q_offset: int | Ints | None = None
    kv_lens: Ints | None = None
    cu_seqlens_q: Ints | None = None
    cu_seqlens_k: Ints | None = None
    tree: torch.Tensor | None = None
    block_mask: BlockLists | None = None
    mask_mod: Callable[..., torch.Tensor] | None = None
    score_mod: Callable[..., torch.Tensor] | None = None
    page_table: torch.Tensor | None = None
    rope: tuple[torch.Tensor, torch.Tensor] | None = None
    normalize: bool = True
    out_dtype: torch.dtype | None = None
    aligned_sums: bool = False
    phase: float = 0.0


@dataclass(frozen=True)
class Attention:
    """Results of the reference.

    o: output, raw if normalize is False.
    lse: ln of the sum of exp(score), including the sink.
    row_max: largest score, the reference of raw O.
    """

    o: torch.Tensor
    lse: torch.Tensor
    row_max: torch.Tensor


@dataclass(frozen=True)
class Entry:
    """Batch entry: q [n_q, Hq, D], and its valid keys, k [n_k, Hkv, D], v [n_k, Hkv, Dv].

    Row r has position offset + r.

    tree: words of the rows, int64 [n_q].
    number: number of the entry.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    offset: int
    tree: torch.Tensor | None = None
    number: int = 0

    def places(self, rows: slice) -> tuple[torch.Tensor, ...]:
        """(b, h, q, k) of all heads, some rows and all keys, as functions of positions take
        them. A position below 0 counts as 0."""
        (n_q, heads, _), device = self.q.shape, self.q.device
        position = (torch.arange(n_q, device=device)[rows, None] + self.offset).clamp(min=0)
        return (
            torch.tensor(self.number, device=device),
            torch.arange(heads, device=device)[:, None, None],
            position,
            torch.arange(self.k.shape[0], device=device),
        )


def definition(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Attention:
    """Compute the fp64 definition; `options` are the fields of `Options`."""
    return _attention(q, k, v, Options(**options), None)


def rounded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Attention:
    """Compute attention with the rounding points of the kernel for inputs of these dtypes."""
    io = E4M3 if k.dtype == E4M3 else q.dtype
    return _attention(q, k, v, Options(**options), io)


def visible_keys(
    n_q: int,
    n_k: int,
    offset: int,
    options: Options,
    rows: slice = slice(None),
    device: torch.device | str = "cpu",
    tree: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return bool [n_q, n_k], restricted to `rows`: whether key c is visible to query row r.

    Row r has position offset + r, and with a tree, words [n_q], offset plus its depth.
    """
    position = torch.arange(n_q, device=device)[rows, None] + offset
    key = torch.arange(n_k, device=device)[None, :]
    left, right = options.window
    if options.causal and tree is None:
        right = 0
    end = torch.full_like(position, n_k)
    if right is not None:
        end = (position + right + 1).clamp(max=n_k)
    elif options.q_offset is not None:  # the prefix and the whole block of queries
        end = end.clamp(max=offset + n_q)
    branch = torch.ones_like(key, dtype=torch.bool)
    if tree is not None:
        sees, depth = branches(tree.to(device), n_q)
        position = offset + depth[rows]
        branch = torch.ones(sees[rows].shape[0], n_k, dtype=torch.bool, device=device)
        first, last = (min(max(edge, 0), n_k) for edge in (offset, offset + n_q))
        branch[:, first:last] = sees[rows, first - offset : last - offset]
    begin = position - left if left is not None else torch.zeros_like(position)
    return branch & (key < end) & ((key >= begin) | (key < options.sink_tokens))


def entries(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options
) -> Iterator[tuple[slice, Entry]]:
    """Every batch entry with its rows in the packed queries (all of them where q is not packed)."""
    starts_q, starts_k = _ints(options.cu_seqlens_q), _ints(options.cu_seqlens_k)
    lens, offsets, table = _ints(options.kv_lens), _ints(options.q_offset), options.page_table
    batch = q.shape[0] if starts_q is None else len(starts_q) - 1
    for b in range(batch):
        rows = slice(None) if starts_q is None else slice(starts_q[b], starts_q[b + 1])
        queries = q[b] if starts_q is None else q[rows]
        if table is not None:
            assert lens is not None  # a page table comes with kv_lens
            pages = table[b, : math.ceil(lens[b] / k.shape[1])].long()
            keys, values = k[pages].flatten(0, 1), v[pages].flatten(0, 1)
        elif starts_k is not None:
            span = slice(starts_k[b], starts_k[b + 1])
            keys, values = k[span], v[span]
        else:
            keys, values = k[b], v[b]
        if lens is not None:
            keys, values = keys[: lens[b]], values[: lens[b]]
        aligned = keys.shape[0] - queries.shape[0]
        if options.block_mask is not None:
            aligned = 0
        offset = aligned if offsets is None else offsets[b if len(offsets) > 1 else 0]
        words = options.tree
        if words is not None:
            words = words[b] if starts_q is None else words[rows]
        yield rows, Entry(queries, keys, values, offset, words, b)


def _ints(values: int | Ints | None) -> list[int] | None:
    if values is None or isinstance(values, int):
        return None if values is None else [values]
    return [int(value) for value in values]


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, io: torch.dtype | None
) -> Attention:
    out_dtype = torch.float64
    if io is not None:
        own = torch.bfloat16 if io == E4M3 else io
        out_dtype = options.out_dtype or (own if options.normalize else torch.float32)
    parts = list(entries(q, k, v, options))
    results = [_one_entry(entry, options, io) for _, entry in parts]
    if not parts:
        *batch, n_q, heads, _ = q.shape
        o, lse = q.new_zeros((*batch, n_q, heads, v.shape[-1])), q.new_zeros((*batch, heads, n_q))
        return Attention(o.to(out_dtype), lse, lse)
    if options.cu_seqlens_q is None:
        o, lse, row_max = (torch.stack(tensors) for tensors in zip(*results, strict=True))
        return Attention(saturated(o, out_dtype), lse, row_max)
    # Rows of no entry are not part of the problem; NaN says that nothing is known of them.
    wide = torch.float64 if io is None else torch.float32
    o = q.new_full((*q.shape[:2], v.shape[-1]), math.nan, dtype=out_dtype)
    lse, row_max = (q.new_full(q.shape[1::-1], math.nan, dtype=wide) for _ in range(2))
    for (rows, _), result in zip(parts, results, strict=True):
        o[rows], lse[:, rows], row_max[:, rows] = saturated(result[0], out_dtype), *result[1:]
    return Attention(o, lse, row_max)


def _one_entry(entry: Entry, options: Options, io: torch.dtype | None) -> tuple[torch.Tensor, ...]:
    """o [n_q, Hq, Dv] before its last rounding, lse and row_max [Hq, n_q]."""
    wide = torch.float64 if io is None else torch.float32
    entry = replace(entry, q=entry.q.to(wide), k=entry.k.to(wide), v=entry.v.to(wide))
    (n_q, q_heads, _), n_k = entry.q.shape, entry.k.shape[0]
    step = max(AT_ONCE[entry.q.device.type] // max(q_heads * n_k, 1), 1)
    parts = [
        _some_rows(entry, slice(first, first + step), options, io)
        for first in range(0, max(n_q, 1), step)
    ]
    o, lse, row_max = (torch.cat(tensors, dim=1) for tensors in zip(*parts, strict=True))
    o = _rotated_back(o.transpose(0, 1), entry.offset, options)
    return divided(o, options.out_scale), lse, row_max


def _some_rows(
    entry: Entry, rows: slice, options: Options, io: torch.dtype | None
) -> tuple[torch.Tensor, ...]:
    """o [Hq, rows, Dv] before it is turned and rounded, lse and row_max [Hq, rows], of an entry in
    the dtype that is computed in."""
    n_q, n_k = entry.q.shape[0], entry.k.shape[0]
    visible = visible_keys(n_q, n_k, entry.offset, options, rows, entry.q.device, entry.tree)
    places = entry.places(rows)
    seen = torch.ones_like(visible) if options.mask_mod is None else options.mask_mod(*places)
    if options.block_mask is not None:
        partial, full = _listed(entry, rows, options.block_mask)
        seen = full | partial & seen
    if options.mask_mod is not None or options.block_mask is not None:
        visible = (visible & seen).expand(entry.q.shape[1], *visible.shape)
    if io is None:
        return _exact_rows(entry, rows, visible, options)
    return _rounded_rows(entry, rows, visible, options, io)


def _exact_rows(
    entry: Entry, rows: slice, visible: torch.Tensor, options: Options
) -> tuple[torch.Tensor, ...]:
    numbers = Numbers(**{each.name: getattr(options, each.name) for each in fields(Numbers)})
    exact = attend(entry.q[rows], entry.k, entry.v, visible, numbers, _change(entry, rows, options))
    o = exact.o.transpose(0, 1)
    if not options.normalize:
        o = o * torch.exp(exact.lse - _finite(exact.row_max))[..., None]
    return o, exact.lse, exact.row_max


def _listed(entry: Entry, rows: slice, lists: BlockLists) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bool [1 or Hq, rows, keys] of the blocks that are seen in part, and as a whole."""
    (n_q, _, _), n_k, device = entry.q.shape, entry.k.shape[0], entry.q.device
    row = torch.arange(n_q, device=device)[rows] // lists.block_rows
    key = torch.arange(n_k, device=device) // lists.block_keys
    found = []
    for kind in ("block", "full"):
        counts, indices = getattr(lists, f"{kind}_counts"), getattr(lists, f"{kind}_indices")
        number = min(entry.number, counts.shape[0] - 1)
        blocks = -(-n_k // lists.block_keys)
        seen = seen_blocks(counts[number].to(device), indices[number].to(device), blocks) > 0
        found.append(seen[:, row][:, :, key])
    return found[0], found[1]


def _change(
    entry: Entry, rows: slice, options: Options
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return the score_mod as a function of all scores [Hq, rows, keys]."""
    function, places = options.score_mod, entry.places(rows)
    if function is None:
        return None
    return lambda scores: function(scores, *places).to(scores).expand(scores.shape)


def _rounded_rows(
    entry: Entry, rows: slice, visible: torch.Tensor, options: Options, io: torch.dtype
) -> tuple[torch.Tensor, ...]:
    q, values = entry.q[rows], entry.v.transpose(0, 1)
    (n_q, q_heads, head_dim), (kv_heads, n_k, v_dim) = q.shape, values.shape
    heads_rows = q_heads // kv_heads * n_q  # of a group, whose heads read the same keys
    queries = q.transpose(0, 1).reshape(kv_heads, heads_rows, head_dim)
    scores = _scores(queries, entry.k.permute(1, 2, 0), options, io).reshape(q_heads, n_q, n_k)
    scores, unit = _units(scores, head_dim, options)
    change = _change(entry, rows, options)
    if change is not None:
        scores = change(scores)
    scores = scores.masked_fill(~visible, -math.inf)
    # Values that no row sees may be anything, NaN too: they are not part of the problem.
    values = values.masked_fill(~visible.flatten(0, -2).any(dim=0)[:, None], 0.0)
    top = q.new_full((q_heads, n_q), -math.inf)
    if n_k:
        top = scores.amax(dim=-1)
    weights = torch.exp2((scores - _finite(top)[..., None]) * (unit * LOG2_E))
    total = weights.sum(dim=-1)
    weights = _rounded_weights(weights, io, options.phase).reshape(kv_heads, heads_rows, n_k)
    o = _weighed(weights, values, options, io).reshape(q_heads, n_q, v_dim)
    o = o * of_heads(o, options.v_scale)
    row_max = top * torch.as_tensor(unit).squeeze(-1)
    if options.sinks is not None:
        # The sink is a key with value zero: it moves the maximum and joins the sum.
        sink = options.sinks.to(q)[:, None]
        highest = torch.maximum(row_max, sink)
        shrink = torch.exp(row_max - _finite(highest))
        # ex2.approx.ftz of a maximum that lags has no subnormal results
        least = torch.finfo(shrink.dtype).tiny * 2.0 ** _most_lag(io)
        shrink = shrink.masked_fill(shrink < least, 0.0)
        total = total * shrink + torch.exp(sink - _finite(highest))
        o, row_max = o * shrink[..., None], highest
    lse = torch.log(total) + _finite(row_max)
    if options.normalize:
        o = o / total.masked_fill(total == 0, 1.0)[..., None]
    return o, lse, row_max


def _scores(q: torch.Tensor, k: torch.Tensor, options: Options, io: torch.dtype) -> torch.Tensor:
    """Q K^T [Hkv, rows, keys] of q [Hkv, rows, D] and k [Hkv, D, keys], by terms of Q where K is
    e4m3."""
    if io != E4M3:
        return _product(q, k, options, io)
    terms, power = _two_terms(q)
    return _product(torch.cat(terms, -1), torch.cat((k, k), -2), options, io) * power


def _weighed(p: torch.Tensor, v: torch.Tensor, options: Options, io: torch.dtype) -> torch.Tensor:
    """P V [Hkv, rows, Dv] of p [Hkv, rows, keys] and v [Hkv, keys, Dv]."""
    if io != E4M3 or not options.aligned_sums:
        return _product(p, v, options, io)
    parts = zip(p.split(FP8_KEYS, -1), v.split(FP8_KEYS, -2), strict=True)
    zeros = p.new_zeros((*p.shape[:-1], v.shape[-1]))
    return sum((_product(*part, options, io) for part in parts), zeros)


def _product(a: torch.Tensor, b: torch.Tensor, options: Options, io: torch.dtype) -> torch.Tensor:
    """A B of numbers of `io`, summed in the dtype of A and B or as tensor cores do."""
    return a @ b if not options.aligned_sums else aligned_product(a, b, io)


def _two_terms(q: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Rows as two terms of e4m3, the smaller one first, and the power of two that their sum is to
    be multiplied by: the largest element is in [128, 256)."""
    _, exponent = torch.frexp(q.abs().amax(dim=-1, keepdim=True))
    x = torch.ldexp(q, 8 - exponent)
    first = x.to(E4M3).to(q.dtype)
    second = (x - first).to(E4M3).to(q.dtype)
    return (second, first), torch.ldexp(torch.ones_like(x[..., :1]), exponent - 8)


def _most_lag(io: torch.dtype) -> float:
    """Largest lag of the kernel's maximum of a row behind the true one, in log2 units."""
    return MAX_FP8_LOG2 if io == E4M3 else MAX_RESCALE_LOG2


def _rounded_weights(weights: torch.Tensor, io: torch.dtype, phase: float) -> torch.Tensor:
    """Return P [Hq, rows, keys] rounded to `io`, in the dtype of the computation."""
    if io != E4M3:
        return weights.to(io).to(weights.dtype)
    rows = torch.arange(math.prod(weights.shape[:-1]), device=weights.device)
    lag = ((rows * GOLDEN + phase) % 1).reshape(weights.shape[:-1])[..., None] * FP8_RESCALE_LOG2
    factor = torch.exp2(lag + (MAX_FP8_LOG2 - FP8_RESCALE_LOG2)).to(weights)
    return (weights * factor).to(io).to(weights.dtype) / factor


def _units(
    scores: torch.Tensor, head_dim: int, options: Options
) -> tuple[torch.Tensor, torch.Tensor | float]:
    """(numbers, unit) with logits = numbers * unit: the kernel multiplies late, in the exponent.

    The unit is a number, or [Hq, 1, 1], above 0; numbers of negative factors are negated."""
    scale = 1.0 / math.sqrt(head_dim) if options.scale is None else options.scale
    factor = None
    if options.q_scale is not None or options.k_scale is not None:
        one = scores.new_ones(scores.shape[0], 1, 1, dtype=torch.float64)
        factor = one * of_heads(one, options.q_scale) * of_heads(one, options.k_scale)
    if options.softcap:
        inner = scale / options.softcap * (1.0 if factor is None else factor)
        return torch.tanh((scores * inner).to(scores)), options.softcap
    if options.score_mod is not None:
        return (scores * (scale * (1.0 if factor is None else factor))).to(scores), 1.0
    if factor is None:
        return scores, scale
    unit = (scale * factor).abs().clamp(MIN_FACTOR / LOG2_E, MAX_FACTOR / LOG2_E)
    return scores * torch.where(factor < 0, -1.0, 1.0).to(scores), unit.to(scores)


def _finite(maximum: torch.Tensor) -> torch.Tensor:
    """0 in place of -inf: (-inf) - (-inf) would be NaN, and any finite maximum gives P = 0."""
    return maximum.masked_fill(maximum == -math.inf, 0.0)


def _rotated_back(o: torch.Tensor, offset: int, options: Options) -> torch.Tensor:
    """Rotate the last rope_dim columns of o [n_q, Hq, Dv] by minus the angle of the row."""
    if options.rope is None:
        return o
    cos, sin = options.rope
    position = (torch.arange(o.shape[0], device=o.device) + offset).clamp(0, cos.shape[0] - 1)
    cos, sin = (table.to(o)[position][:, None, :] for table in (cos, sin))
    first = o.shape[-1] - 2 * cos.shape[-1]
    x, y = o[..., first::2], o[..., first + 1 :: 2]
    turned = torch.stack((x * cos + y * sin, y * cos - x * sin), dim=-1).flatten(-2)
    return torch.cat((o[..., :first], turned), dim=-1)
