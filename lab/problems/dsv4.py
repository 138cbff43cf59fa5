"""What a layer of DeepSeek-V4 does with its cache beside attention: compressors.

A problem draws arguments; its peers take them: `kvcache`, and torch as somebody would write it. Up
to DECODED tokens there are as many requests with a token each, and every token completes a window:
the worst that a step of decode can do. More tokens are a chunk of one request. Bytes are those
that have to be read and written: rows of the step, older rows of the tail as far as windows need
them, rows that are saved, entries, weights and tables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from kvcache.books.step import Step
from kvcache.layouts.latent import ROPE
from kvcache.layouts.layout import Layout, Stream, Tail
from kvcache.layouts.models import CSA, HCA, Options, deepseek_v4
from kvcache.layouts.rows import Rows, TailRows
from lab.problems.dsv4_index import index_makers
from lab.problems.steps import Arguments, Maker, Problem
from mla.compressor import reference
from mla.compressor.api import Compressor, Tables, compress
from mla.compressor.arguments import Job

MOST_BYTES = 1 << 31  # of a problem
DECODED = 256  # tokens up to which each belongs to a request of its own
BEGUN = 1024  # tokens that a request has before
SPREAD = 3.0  # of scores
AGREED = 1e-3  # share of bytes that may differ: exponentials are not torch's, and some are ties
TABLE_BYTES = 3 * 8 + 4  # of a token
CHECKED = 4711  # seed of what is compared

# name -> (stream, tail, options of the layout)
COMPRESSORS = {
    "C4, fp8_584": ("csa", "csa_tail", Options()),
    "C4, bf16_512": ("csa", "csa_tail", Options(record="bf16")),
    "C4 index, mxfp4": ("index", "index_tail", Options()),
    "C128, fp8_584": ("hca", "hca_tail", Options()),
    "C128 online, fp8_584": ("hca", "hca_tail", Options(online_hca=True)),
}


def makers(hidden: int) -> dict[str, list[Maker]]:
    """By step."""
    return {"compress": [partial(_compress, name) for name in COMPRESSORS], **index_makers()}


def _step(layout: Layout, count: int, ratio: int) -> Step:
    """So many tokens: of as many requests, or of one."""
    one = count > DECODED
    requests = 1 if one else count
    begun = BEGUN if one else BEGUN + ratio - 1
    starts = np.full(requests, begun, np.int32)
    blocks = -(-(begun + (count if one else 1)) // layout.block_tokens)
    tables = np.arange(requests * blocks, dtype=np.int32).reshape(requests, blocks) + 1
    return Step(
        layout=layout,
        requests=(None,) * requests,
        starts=starts,
        lengths=starts + (count if one else 1),
        state_slots=np.arange(requests, dtype=np.int32)[::-1] + 1,
        block_tables=tables,
    )


def _nbytes(step: Step, stream: Stream, tail: Tail) -> int:
    """See above."""
    row = 4 * tail.width
    count, ends = int(step.cu_tokens[-1]), len(step.ends_of(stream.name))
    saved = int((step.rows_of(tail.name) >= 0).sum())
    begun, new = step.starts % tail.ratio, step.lengths - step.starts
    if tail.online:
        older, kept = 3 * int((begun > 0).sum()), 3
    else:  # of windows that end in this step: those of theirs, and those of the window before
        rows = np.where(begun + new >= tail.ratio, begun + (tail.overlap - 1) * tail.ratio, 0)
        older, kept = 2 * int(rows.sum()), 2 * tail.overlap
    moved = count * 2 * tail.overlap + older + saved * kept + tail.ratio * tail.overlap + 1
    return moved * row + ends * (stream.record.bytes + 4 + 4 * ROPE) + count * TABLE_BYTES


def _compress(name: str, count: int) -> Problem:
    stream_name, tail_name, options = COMPRESSORS[name]
    layout = deepseek_v4("v4", [HCA if stream_name == "hca" else CSA], 128, options)
    stream, tail = layout.find(stream_name), layout.find(tail_name)
    step = _step(layout, count, tail.ratio)
    columns = tail.overlap * tail.width

    def draw(seed: int, device: str) -> Arguments:
        generator = torch.Generator(device).manual_seed(seed)
        normal = partial(torch.randn, generator=generator, device=device)
        requests, blocks = step.block_tables.shape
        states = normal(requests + 1, layout.state_bytes // 4).view(torch.uint8)
        pool = torch.zeros(requests * blocks + 1, layout.block_bytes, dtype=torch.uint8)
        place = layout.place(stream_name, 0)
        where = place.data_offset, place.scale_offset, place.rows, place.record
        out = Rows(pool.to(device), *where)
        rows = TailRows(states, layout.offset(tail_name, 0), tail.rows(layout.draft), tail)
        if tail.online:
            rows.parts()[1].abs_().add_(1.0)
        both = normal(count, 2, columns)
        scores = both[:, 1].mul_(SPREAD)
        angles = normal(int(step.lengths.max()), ROPE // 2)
        ape, weight = normal(tail.ratio, columns), normal(tail.width)
        tables = Tables.of(step.tensors(device), stream_name, tail_name)
        job = Job(
            Compressor(ape, weight), rows, out, both[:, 0], scores, tables,
            angles.cos(), angles.sin(), step.longest,
        )  # fmt: skip
        kept = torch.from_numpy(np.flatnonzero(step.rows_of(tail_name) >= 0)).to(device)
        return job, job.tables.ends.long(), kept

    def check(arguments: Arguments, outputs: Any) -> None:
        """What the draw before it left, beside a reference that begins with the same bytes."""
        job, *_ = draw(CHECKED, arguments[0].values.device.type)
        again = dataclasses.replace(
            job,
            tail=dataclasses.replace(job.tail, pool=job.tail.pool.clone()),
            out=dataclasses.replace(job.out, pool=job.out.pool.clone()),
        )
        _ours(job)
        reference.compress(again)
        _expect_close("tail", job.tail.parts(), again.tail.parts())
        wrong = int((job.out.pool != again.out.pool).sum())
        written = len(step.ends_of(stream_name)) * stream.record.bytes
        if wrong > written * AGREED + 8:
            raise ValueError(f"wrong: {wrong} of {written} bytes are not the reference's")

    nbytes = _nbytes(step, stream, tail)
    peers = {"kvcache": _ours}
    if not tail.online:  # of which torch would make thousands of launches
        peers["torch"] = _by_torch
    return Problem("compress", name, count, nbytes, draw, peers, check)


def _ours(job: Job, *_: torch.Tensor) -> None:
    compress(**vars(job))


def _by_torch(job: Job, ends: torch.Tensor, kept: torch.Tensor) -> None:
    if len(ends):
        reference.store(job, reference.normalised(job, reference.pooled(job, ends)), ends)
    reference.save(job, kept)


def _expect_close(name: str, mine: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> None:
    for got, expected in zip(mine, theirs, strict=True):
        if not torch.allclose(got[1:], expected[1:], rtol=1e-4, atol=1e-5, equal_nan=True):
            raise ValueError(f"wrong: the {name} differs from the reference's")
