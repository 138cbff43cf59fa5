"""What the indexer of a CSA layer does: queries prepared, keys scored, the best of them taken.

Up to DECODED tokens each belongs to a request of its own, with keys
of its own; more of them are a chunk of one request. Of the best keys bytes are scores and results:
how often scores are read is the kernel's affair. torch takes them by topk, without an order, and
has neither counts nor block tables to look at.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from kvcache.layouts.rows import Rows
from lab.problems.steps import Arguments, Maker, Problem
from mla.indexer import quantised as definition
from mla.indexer import reference
from mla.indexer.api import IndexQuery, prepare_query, scores, select
from mla.indexer.formats import FORMATS, WIDTH

DECODED = 256  # tokens up to which each belongs to a request of its own
HEADS, BEST = 64, 512
BLOCK = 32  # entries
CANDIDATES = (4096, 65536, 262144)
SCORED = 16384  # keys of a request: a context of 64k
SCORE_RECORDS = ("indexer_fp4", "indexer_fp8")
CHUNK = 64  # tokens that torch scores at a time
CHECKED = 8  # rows
SCORE_ERROR = 2.0**-16  # of the sum of magnitudes


def index_makers() -> dict[str, list[Maker]]:
    """By step."""
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
        """In bf16, of keys and queries that are read back first."""
        out = tables[-1]
        data, scale = rows.data().flatten(0, 1), rows.scales().flatten(0, 1)
        keys = definition.dequantised(data, scale, form.record).bfloat16()
        keys = keys.view(requests, SCORED, WIDTH)
        q = reference.query_values(rows, *query[:2]).bfloat16()
        for begin in range(0, count, CHUNK):
            some = slice(begin, begin + CHUNK)
            mine = keys[some] if requests > 1 else keys
            products = torch.relu(q[some] @ mine.mT).float()
            out[some] = (products * query.weights[some, :, None]).sum(1)

    def check(arguments: Arguments, outputs: None) -> None:
        rows, query, *tables, out = arguments
        ours(*arguments)
        moved = Rows(rows.pool.cpu(), 0, rows.scale_offset, rows.rows, rows.record)
        few = [tensor[:CHECKED].cpu() for tensor in query]
        owners, counts, block_tables = (tensor.cpu() for tensor in tables)
        expected = torch.empty(len(few[0]), SCORED, dtype=torch.float64)
        reference.scores(moved, tuple(few), (owners[:CHECKED], counts[:CHECKED], block_tables),
                         expected)  # fmt: skip
        error = (out[:CHECKED].cpu().double() - expected).abs().max()
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
        few = slice(0, CHECKED)
        paging = owners[few], tables, BLOCK
        expected = reference.select(found[few], counts[few], BEST, paging)
        for mine, theirs in zip(outputs, expected, strict=True):
            if not torch.equal(mine[few].cpu(), theirs):
                raise ValueError("wrong: others than the reference's")

    nbytes = count * (candidates * dtype.itemsize + 8 * BEST + 12)
    name = f"{BEST} of {candidates}, {str(dtype).removeprefix('torch.')}"
    return Problem("topk", name, count, nbytes, draw, {"kvcache": ours, "torch": by_torch}, check)
