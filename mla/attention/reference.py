"""Attention to latent keys in plain torch: the definition, and the definition with the kernels'
roundings.

Both gather the entries that a query entry names, from one cache or two, and compute one softmax
over all of them. V of an entry is its first 512 columns. Entries are decoded as
`mla.attention.codec` does, to bf16.

`definition` evaluates everything in fp64; the softmax is that of `kernelkit.numerics.definition`.
`rounded` rounds where kernels round: scores and sums in fp32, P to bf16, O to bf16 at the very end.
CTAs of the wgmma kernel that share keys also round their O, not yet normalised, to bf16.
The distance between the two is the kernels' tolerance (`kernelkit.numerics.tolerance`).

A sink is one more logit of each head, whose value is zero. It changes O, and not the LSE, which is
that of the keys alone. A row without keys has O = 0 and LSE = -inf. The last 64 columns of O are
rotated back: neighbours (x, y) become (x cos + y sin, y cos - x sin).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernelkit.numerics.definition import Numbers, attend
from kernelkit.plan.log2 import LOG2_E
from mla.attention.formats import LATENT

ROPE = 64  # columns of O that are rotated back
TILE = 64  # keys of a tile that CTAs divide; tiles of another source begin anew


@dataclass(frozen=True)
class Source:
    """Keys of a cache, and the entries that each query entry names.

    keys: [entries, columns], decoded: bf16, or e4m3 that `Options.key_scale` multiplies.
    places: integers [N, k], numbers of entries; others than 0 to entries - 1 are no entry.
    counts: integers [N], how many numbers of a row are valid; None for all k.
    """

    keys: torch.Tensor
    places: torch.Tensor
    counts: torch.Tensor | None = None


@dataclass(frozen=True)
class Options:
    """Arguments that change a result.

    scale: factor of q.k; None is columns ** -0.5.
    causal: query token t of T sees no key of the last T - 1 - t of the first source.
    sinks: fp32 [H], natural-log logits.
    rope: (cos, sin), fp32 [positions, 32].
    positions: integers [N], rows of these tables; others count as the first or the last row.
    key_scale: fp32 [1] or a number, factor of keys in e4m3.
    """

    scale: float | None = None
    causal: bool = False
    sinks: torch.Tensor | None = None
    rope: tuple[torch.Tensor, torch.Tensor] | None = None
    positions: torch.Tensor | None = None
    key_scale: torch.Tensor | float | None = None


@dataclass(frozen=True)
class Attended:
    """o [N, T, H, 512]; lse [N, H, T], natural log."""

    o: torch.Tensor
    lse: torch.Tensor


def definition(q: torch.Tensor, sources: Sequence[Source], **options: Any) -> Attended:
    """Compute the fp64 definition.

    Args:
        q: bf16 [N, T, H, columns].
        sources: one cache or two.
        options: fields of `Options`.
    """
    return _attended(q, sources, Options(**options), exact=True)


def rounded(
    q: torch.Tensor, sources: Sequence[Source], *, senders: int = 0, **options: Any
) -> Attended:
    """Compute the same with the rounding points of the kernels.

    Args:
        q, sources, options: as of `definition`.
        senders: CTAs that divide the tiles of an entry, and send each other O in bf16; 0 for a
            kernel that keeps O in fp32 (`choose.Decision.senders`).
    """
    return _attended(q, sources, Options(**options), exact=False, senders=senders)


def of_pages(
    keys: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor | None = None
) -> Source:
    """Return the source of entries whose pages a table lists.

    Args:
        keys: [pages, page_size, columns].
        table: int32 [N, pages of an entry].
        lengths: int32 [N]; None for all rows of the listed pages.
    """
    size = keys.shape[1]
    row = torch.arange(size, device=table.device)
    there = (table >= 0) & (table < len(keys))
    places = torch.where(there[..., None], table.long()[..., None] * size + row, -1)
    return Source(keys.flatten(0, 1), places.flatten(1), lengths)


def _attended(
    q: torch.Tensor, sources: Sequence[Source], options: Options, *, exact: bool, senders: int = 0
) -> Attended:
    wide = torch.float64 if exact else torch.float32
    entries, tokens, heads, columns = q.shape
    o = torch.zeros(entries, tokens, heads, LATENT, dtype=wide, device=q.device)
    lse = torch.full((entries, heads, tokens), -math.inf, dtype=wide, device=q.device)
    scale = columns**-0.5 if options.scale is None else options.scale
    for entry in range(entries):
        keys, visible, tiles = _gathered(sources, entry, tokens, options)
        if exact:
            o[entry], lse[entry] = _exact(q[entry], keys, visible, scale, options)
            continue
        shares = [visible & own for own in _shares(tiles, senders)] or [visible]
        factor = 1.0 if options.key_scale is None else float(options.key_scale)
        parts = [_rounded(q[entry], keys, seen, scale * factor) for seen in shares]
        o[entry], lse[entry] = _merged(parts, scale * factor, in_bf16=senders > 0)
        o[entry] *= factor
    o = _without_sinks_share(o, lse, options.sinks)
    o = _rotated_back(o, options)
    return Attended(o if exact else o.bfloat16(), lse)


def _gathered(
    sources: Sequence[Source], entry: int, tokens: int, options: Options
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (keys [n, columns], which of them each token sees, bool [tokens, n], tile of each)."""
    keys, visible, tiles, begin = [], [], [], 0
    for number, source in enumerate(sources):
        places = source.places[entry].long()
        most = len(places)
        count = most if source.counts is None else int(source.counts[entry])
        count = min(max(count, 0), most)
        there = (places >= 0) & (places < len(source.keys))
        index = torch.arange(most, device=places.device)
        end = torch.full((tokens, 1), count, device=places.device)
        if options.causal and not number:
            end = end - torch.arange(tokens - 1, -1, -1, device=places.device)[:, None]
        visible.append(there & (index < end))
        tiles.append(begin + index // TILE)
        begin += -(-count // TILE)
        if len(source.keys):
            keys.append(source.keys[places.clamp(0, len(source.keys) - 1)])
        else:
            keys.append(source.keys.new_zeros(most, source.keys.shape[1]))
    return torch.cat(keys), torch.cat(visible, 1), torch.cat(tiles)


def _shares(tiles: torch.Tensor, senders: int) -> list[torch.Tensor]:
    """Return which keys each sender has: as equal numbers of tiles as there can be, in order."""
    if not senders or not len(tiles):
        return []
    count = int(tiles.max()) + 1
    base, more = divmod(count, senders)
    ends = [(cta + 1) * base + min(cta + 1, more) for cta in range(min(count, senders))]
    begins = [0, *ends[:-1]]
    return [(tiles >= begin) & (tiles < end) for begin, end in zip(begins, ends, strict=True)]


def _exact(
    q: torch.Tensor, keys: torch.Tensor, visible: torch.Tensor, scale: float, options: Options
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return O [T, H, 512] and LSE [H, T] of one entry, in fp64."""
    wide = keys.double() * (1.0 if options.key_scale is None else options.key_scale)
    found = attend(q, wide[:, None], wide[:, None, :LATENT], visible, Numbers(scale=scale))
    return found.o, found.lse


Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # O, sum, base, as a CTA has them


def _rounded(q: torch.Tensor, keys: torch.Tensor, visible: torch.Tensor, unit: float) -> Part:
    """Return (O [T, H, 512], not normalised; sum and base of the weights [H, T]) in fp32.

    unit: factor of q.k. A base is the largest q.k, or 0 without keys.
    """
    wide = keys.float().masked_fill(~visible.any(0)[:, None], 0.0)
    scores = torch.einsum("thc,nc->htn", q.float(), wide).masked_fill(~visible, -math.inf)
    base = scores.new_full(scores.shape[:2], -math.inf)
    if len(keys):
        base = scores.amax(-1)
    shift = base.masked_fill(base == -math.inf, 0.0)
    weights = torch.exp2((scores - shift[..., None]) * (unit * LOG2_E))
    o = torch.einsum("htn,nc->thc", weights.bfloat16().float(), wide[:, :LATENT])
    return o, weights.sum(-1), base


def _merged(
    parts: Sequence[Part], unit: float, *, in_bf16: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return O [T, H, 512] and LSE [H, T] of an entry; O of each part is rounded if `in_bf16`."""
    base = torch.stack([part[2] for part in parts]).amax(0)
    base = base.masked_fill(base == -math.inf, 0.0)
    whole, total = torch.zeros_like(parts[0][0]), torch.zeros_like(base)
    for o, sums, own in parts:
        weight = torch.exp2((own - base) * (unit * LOG2_E))
        sent = o.bfloat16().float() if in_bf16 else o
        whole += sent * weight.transpose(0, 1)[..., None]
        total += sums * weight
    inverse = 1.0 / total.masked_fill(total == 0, 1.0)
    return whole * inverse.transpose(0, 1)[..., None], torch.log(total) + base * unit


def _without_sinks_share(
    o: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Scale O by what the sinks leave of each row: 1 / (1 + exp(sink - LSE))."""
    if sinks is None:
        return o
    logit = lse - sinks.to(lse)[:, None]
    left = torch.sigmoid(logit.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf))
    return o * left.transpose(1, 2)[..., None]


def _rotated_back(o: torch.Tensor, options: Options) -> torch.Tensor:
    """Rotate the last columns of o [N, T, H, 512] by minus the angles of the entry's position."""
    if options.rope is None:
        return o
    assert options.positions is not None  # both or none
    row = options.positions.clamp(0, len(options.rope[0]) - 1)
    cos, sin = (table.to(o)[row][:, None, None] for table in options.rope)
    x, y = o[..., -ROPE::2], o[..., 1 - ROPE :: 2]
    turned = torch.stack((x * cos + y * sin, y * cos - x * sin), -1).flatten(-2)
    return torch.cat((o[..., :-ROPE], turned), -1)
