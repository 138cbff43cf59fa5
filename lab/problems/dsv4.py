"""Steps of a DeepSeek-V4 layer on its cache other than attention: compressors.

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
from lab.problems import between
from lab.problems.steps import Arguments, Maker, Problem
from mla.compressor import reference as compressor_reference
from mla.compressor.api import Compressor, Tables, compress
from mla.compressor.arguments import Job
from mla.indexer import quantised as definition
from mla.indexer import reference as index_reference
from mla.indexer.api import IndexQuery, prepare_query, scores, select
from mla.indexer.formats import FORMATS, WIDTH

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
    """Return the makers by step."""
    return {
        "compress": [partial(_compress, name) for name in COMPRESSORS],
        **index_makers(),
        "norm_rope": between.makers(),
    }


def _step(layout: Layout, count: int, ratio: int) -> Step:
    """Make a step of `count` tokens: of as many requests, or of one."""
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
        """Compare what the previous draw left with a reference that begins with the same bytes."""
        job, *_ = draw(CHECKED, arguments[0].values.device.type)
        again = dataclasses.replace(
            job,
            tail=dataclasses.replace(job.tail, pool=job.tail.pool.clone()),
            out=dataclasses.replace(job.out, pool=job.out.pool.clone()),
        )
        _ours(job)
        compressor_reference.compress(again)
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
        compressor_reference.store(
            job, compressor_reference.normalised(job, compressor_reference.pooled(job, ends)), ends
        )
    compressor_reference.save(job, kept)


def _expect_close(name: str, mine: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> None:
    for got, expected in zip(mine, theirs, strict=True):
        if not torch.allclose(got[1:], expected[1:], rtol=1e-4, atol=1e-5, equal_nan=True):
            raise ValueError(f"wrong: the {name} differs from the reference's")


# What the indexer of a CSA layer does: queries prepared, keys scored, the best of them taken.
#
# Up to DECODED tokens each belongs to a request of its own, with keys of its own; more of them are
# a chunk of one request. Of the best keys bytes are scores and results: how often scores are read
# is the kernel's affair. torch takes them by topk, without an order, and has neither counts nor
# block tables to look at.


HEADS, BEST = 64, 512
BLOCK = 32  # entries
CANDIDATES = (4096, 65536, 262144)
SCORED = 16384  # keys of a request: a context of 64k
SCORE_RECORDS = ("indexer_fp4", "indexer_fp8")
CHUNK = 64  # tokens that torch scores at a time
CHECKED_ROWS = 8  # rows
SCORE_ERROR = 2.0**-16  # of the sum of magnitudes


def index_makers() -> dict[str, list[Maker]]:
    """Return the makers by step."""
    return {
        "query": [partial(_query, record) for record in FORMATS],
        "score": [partial(_score, record) for record in SCORE_RECORDS],
        "topk": [
            *(partial(_topk, number, torch.float32) for number in CANDIDATES),
            partial(_topk, CANDIDATES[-1], torch.bfloat16),
        ],
    }


def _normal(seed: int, device: str, *shape: int) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device)


def _rope(count: int, seed: int, device: str) -> tuple[torch.Tensor, ...]:
    angles = _normal(seed, device, count, 32)
    return torch.arange(count, device=device), angles.cos(), angles.sin()


# -- queries --------------------------------------------------------------------------------------


def _query(record: str, count: int) -> Problem:
    form = FORMATS[record]

    def draw(seed: int, device: str) -> Arguments:
        q = _normal(seed, device, count, HEADS, WIDTH).bfloat16()
        weights = _normal(seed + 1, device, count, HEADS).bfloat16()
        return q, weights, *_rope(count, seed + 2, device)

    def ours(*arguments: torch.Tensor) -> IndexQuery:
        return prepare_query(*arguments, record=record)

    def by_torch(q: torch.Tensor, weights: torch.Tensor, *rope: torch.Tensor) -> tuple:
        positions, cos, sin = rope
        rows = definition.prepared(q, cos[positions][:, None], sin[positions][:, None])
        data, scales = definition.quantised(rows, form.record)
        if form.scale_size > 1:
            weights = weights.float() * definition.scale_values(scales, form.record)[..., 0]
        return data, scales, weights.float()

    def check(arguments: Arguments, outputs: IndexQuery) -> None:
        data, _, weights = by_torch(*arguments)
        equal = torch.equal(outputs.data.view(torch.uint8), data)
        if not equal or not torch.equal(outputs.weights, weights):
            raise ValueError("wrong: other bits than the definition's")

    row = 2 * WIDTH + form.record.bytes + 2 + 4
    nbytes = count * (HEADS * row + 8 + 2 * 128)
    peers = {"kvcache": ours, "torch": by_torch}
    return Problem("query", record, count, nbytes, draw, peers, check)


# -- scores ---------------------------------------------------------------------------------------


def _score(record: str, count: int) -> Problem:
    form = FORMATS[record]
    requests = count if count <= DECODED else 1
    blocks = SCORED // BLOCK

    def draw(seed: int, device: str) -> Arguments:
        page = form.record.page_bytes(BLOCK)
        pool = torch.zeros(requests * blocks, page, dtype=torch.uint8, device=device)
        rows = Rows(pool, 0, BLOCK * form.record.data_bytes, BLOCK, form.record)
        keys = _normal(seed, device, rows.entries, WIDTH).bfloat16()
        data, scales = definition.quantised(keys, form.record)
        rows.data()[:], rows.scales()[:] = (x.view(-1, BLOCK, x.shape[1]) for x in (data, scales))
        q = _normal(seed + 1, device, count, HEADS, WIDTH).bfloat16()
        weights = _normal(seed + 2, device, count, HEADS)
        query = prepare_query(q, weights, *_rope(count, seed + 3, device), record=record)
        tables = torch.arange(requests * blocks, device=device).view(requests, blocks).int()
        owners = torch.arange(count, device=device) % requests
        counts = torch.full((count,), SCORED, dtype=torch.int32, device=device)
        out = torch.empty(count, SCORED, device=device)
        return rows, query, owners.int(), counts, tables, out

    def ours(*arguments: Any) -> None:
        scores(*arguments, longest=count // requests)

    def by_torch(rows: Rows, query: IndexQuery, *tables: torch.Tensor) -> None:
        """Score in bf16, with keys and queries read back first."""
        out = tables[-1]
        data, scale = rows.data().flatten(0, 1), rows.scales().flatten(0, 1)
        keys = definition.dequantised(data, scale, form.record).bfloat16()
        keys = keys.view(requests, SCORED, WIDTH)
        q = index_reference.query_values(rows, *query[:2]).bfloat16()
        for begin in range(0, count, CHUNK):
            some = slice(begin, begin + CHUNK)
            mine = keys[some] if requests > 1 else keys
            products = torch.relu(q[some] @ mine.mT).float()
            out[some] = (products * query.weights[some, :, None]).sum(1)

    def check(arguments: Arguments, outputs: None) -> None:
        rows, query, *tables, out = arguments
        ours(*arguments)
        moved = Rows(rows.pool.cpu(), 0, rows.scale_offset, rows.rows, rows.record)
        few = [tensor[:CHECKED_ROWS].cpu() for tensor in query]
        owners, counts, block_tables = (tensor.cpu() for tensor in tables)
        expected = torch.empty(len(few[0]), SCORED, dtype=torch.float64)
        few_tables = owners[:CHECKED_ROWS], counts[:CHECKED_ROWS], block_tables
        index_reference.scores(moved, tuple(few), few_tables, expected)
        error = (out[:CHECKED_ROWS].cpu().double() - expected).abs().max()
        if error > SCORE_ERROR * expected.abs().max() * HEADS:
            raise ValueError(f"wrong: scores differ by {error:.3g} from the reference's")

    keys = requests * SCORED * form.record.bytes
    nbytes = keys + count * (SCORED * 4 + HEADS * (form.record.bytes + 4))
    name = f"{SCORED} keys, {record}"
    return Problem("score", name, count, nbytes, draw, {"kvcache": ours, "torch": by_torch}, check)


# -- the best -------------------------------------------------------------------------------------


def _topk(candidates: int, dtype: torch.dtype, count: int) -> Problem:
    blocks = candidates // BLOCK

    def draw(seed: int, device: str) -> Arguments:
        found = _normal(seed, device, count, candidates).to(dtype)
        counts = torch.full((count,), candidates, dtype=torch.int32, device=device)
        generator = torch.Generator().manual_seed(seed)
        tables = torch.randperm(blocks, generator=generator).int()[None].to(device)
        return found, counts, torch.zeros_like(counts), tables

    def ours(
        found: torch.Tensor, counts: torch.Tensor, owners: torch.Tensor, tables: torch.Tensor
    ) -> tuple:
        return select(found, counts, BEST, owners=owners, block_tables=tables, entries=BLOCK)

    def by_torch(found: torch.Tensor, *tables: torch.Tensor) -> torch.Tensor:
        return torch.topk(found, BEST, sorted=False).indices

    def check(arguments: Arguments, outputs: tuple) -> None:
        found, counts, owners, tables = (tensor.cpu() for tensor in arguments)
        few = slice(0, CHECKED_ROWS)
        paging = owners[few], tables, BLOCK
        expected = index_reference.select(found[few], counts[few], BEST, paging)
        for mine, theirs in zip(outputs, expected, strict=True):
            if not torch.equal(mine[few].cpu(), theirs):
                raise ValueError("wrong: others than the reference's")

    nbytes = count * (candidates * dtype.itemsize + 8 * BEST + 12)
    name = f"{BEST} of {candidates}, {str(dtype).removeprefix('torch.')}"
    return Problem("topk", name, count, nbytes, draw, {"kvcache": ours, "torch": by_torch}, check)
