"""Definition of a compressor, in plain torch, in fp32 or wider.

A token has values and scores, `overlap * width` columns each; `ape` of its place in the window is
added to its scores. Entry i of windows of m tokens is complete with position m i + m - 1. Each of
its `width` channels is the mean of the values of `overlap * m` rows, weighted by a softmax of their
scores over these rows. Rows of its own window use the last `width` columns, rows of the window
before the columns before those, and so on. Rows before position 0 have no weight. RMSNorm and RoPE,
at position m i, and the record's encoding follow.

Kernels round weights and sums in their own order, which is the same for every cut of the tokens
into steps.
"""

from __future__ import annotations

import math

import torch

from kvcache.layouts.latent import LATENTS
from kvcache.layouts.rows import Rows
from kvcache.movement import reference
from mla.compressor.arguments import Compressor, Job
from mla.indexer import quantised as index_records
from mla.indexer.formats import FORMATS


def compress(job: Job) -> None:
    """Write entries to their rows, and update the tail; `Job` documents the arguments."""
    tables = job.tables
    ends = tables.ends[tables.ends >= 0].long()
    ends = ends[tables.entries[ends] >= 0]
    store(job, normalised(job, pooled(job, ends)), ends)
    save(job, (tables.tail_rows >= 0).nonzero().flatten())


def pooled(job: Job, ends: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the pooled entries [E, width] of the tokens `ends`."""
    if job.tail.tail.online:
        _, total, value = walked_to(job, ends, dtype)
        return value / total
    values, scores = window(job, ends, dtype)
    weights = torch.softmax(scores, 1)
    return (weights * torch.where(weights > 0, values, 0.0)).sum(1)


def window(
    job: Job, ends: torch.Tensor, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (values, scores with ape) [E, overlap * ratio, width] of the rows of the entries that
    `ends` complete, oldest first; scores of missing rows are -inf."""
    tail, tables = job.tail.tail, job.tables
    rows = torch.arange(tail.overlap * tail.ratio, device=ends.device)
    back = len(rows) - 1 - rows
    at, token = tables.positions[ends][:, None] - back, (ends[:, None] - back).clamp(min=0)
    owner = tables.owners[ends].long()
    new = (at >= tables.starts[owner][:, None])[..., None]
    old = (at >= 0)[..., None]
    place = tables.state_slots[owner].long()[:, None].clamp(min=0), at % job.tail.rows
    found = []
    mine = job.values[token], with_ape(job, token)
    for source, part, nothing in zip(mine, job.tail.parts(), (0.0, -math.inf), strict=True):
        both = torch.where(new, source, torch.where(old, part[place], nothing))
        blocks = both.unflatten(-1, (tail.overlap, tail.width))
        found.append(blocks[:, rows, rows // tail.ratio].to(dtype))
    return found[0], found[1]


def with_ape(job: Job, tokens: torch.Tensor) -> torch.Tensor:
    """Return the scores of tokens of the step with ape, in fp32."""
    return job.scores[tokens] + job.compressor.ape[job.tables.positions[tokens] % job.entry.ratio]


def walked_to(
    job: Job, tokens: torch.Tensor, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Return (maxima, sums, values) [n, width] of the windows of `tokens` up to these tokens, token
    by token, starting from the tail's state."""
    tail, tables = job.tail.tail, job.tables
    position, owner = tables.positions[tokens], tables.owners[tokens].long()
    start, slot = tables.starts[owner], tables.state_slots[owner].long().clamp(min=0)
    begin = position // tail.ratio * tail.ratio
    resumed = (begin < start)[:, None]
    place = slot, (start - 1) % job.tail.rows
    zeros = torch.zeros(len(tokens), tail.width, dtype=dtype, device=tokens.device)
    nothing = (-math.inf, 0.0, 0.0)
    state = [
        torch.where(resumed, part[place].to(dtype), zeros + number)
        for part, number in zip(job.tail.parts(), nothing, strict=True)
    ]
    for inside in range(tail.ratio):
        at = begin + inside
        here = ((at >= start) & (at <= position))[:, None]
        token = (tokens - (position - at)).clamp(0, job.tokens - 1)
        value, score = job.values[token].to(dtype), with_ape(job, token).to(dtype)
        new = one_more(state, value, score)
        state = [torch.where(here, *pair) for pair in zip(new, state, strict=True)]
    return state


def one_more(
    state: list[torch.Tensor], value: torch.Tensor, score: torch.Tensor
) -> list[torch.Tensor]:
    """Add a token to (maxima, sums, values)."""
    top, total, acc = state
    higher = torch.maximum(top, score)
    base = torch.where(higher == -math.inf, 0.0, higher)
    old, new = torch.exp(top - base), torch.exp(score - base)
    return [higher, total * old + new, acc * old + value * new]


def normalised(job: Job, x: torch.Tensor) -> torch.Tensor:
    """Apply RMSNorm to x [E, width]."""
    compressor: Compressor = job.compressor
    mean = x.square().mean(-1, keepdim=True)
    return x * torch.rsqrt(mean + compressor.eps) * compressor.weight


def store(job: Job, x: torch.Tensor, ends: torch.Tensor) -> None:
    """Store entries in fp32 or wider, not rotated yet, to the rows of the tokens `ends`."""
    data, scales = bytes_of(job, prepared(job, x, ends))
    out, numbers = job.out, job.tables.entries[ends]
    _put(out, out.data(), numbers, data)
    if out.record.scale_bytes:
        _put(out, out.scales(), numbers, scales)


def prepared(job: Job, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Rotate entries, transform index keys, and round to bf16."""
    first = job.tables.positions[ends] + 1 - job.tail.tail.ratio
    angles = job.cos[first], job.sin[first]
    if job.out.record.name in FORMATS:
        return index_records.prepared(x.float(), *angles)
    return reference.rotated(x.float(), *angles)


def bytes_of(job: Job, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (data, scales) of entries in bf16."""
    record = job.out.record
    if record.name in FORMATS:
        return index_records.quantised(entries, record)
    if not LATENTS[record.name].group:
        return entries.view(torch.uint8), entries.view(torch.uint8)[:, :0]
    return reference.quantised(entries, record)


def _put(out: Rows, view: torch.Tensor, numbers: torch.Tensor, values: torch.Tensor) -> None:
    view[numbers // out.rows, numbers % out.rows] = values


def save(job: Job, kept: torch.Tensor) -> None:
    """Store the tokens `kept`, the last ones of every request, to its tail."""
    found = job.values[kept], with_ape(job, kept)
    if job.tail.tail.online:
        found = walked_to(job, kept)
    numbers = job.tables.tail_rows[kept]
    for part, value in zip(job.tail.parts(), found, strict=True):
        part[numbers // job.tail.rows, numbers % job.tail.rows] = value
