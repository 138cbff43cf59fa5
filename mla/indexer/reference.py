"""Scores of index keys, and the best of them, in plain torch: what kernels are compared with.

    out[t, s] = s_key sum_h w[t, h] max(0, q[t, h] . k[s])      for s < counts[t]

Key s of token t is entry block_tables[b, s // E] * E + s % E of the rows, b = owners[t], E entries
in a slot. s_key is the scale of a key that has one for all its elements, otherwise 1: scales of
groups, of e2m1, are in q . k. What has a NaN in it is NaN, a product that is not positive too.
"""

from __future__ import annotations

import torch

from kvcache.layouts.rows import Rows
from mla.indexer.formats import index_format
from mla.indexer.quantised import dequantised

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def scores(
    rows: Rows,
    query: Tensors,
    tables: Tensors,
    out: torch.Tensor,
    dtype: torch.dtype = torch.float64,
) -> None:
    """Into out [T, S], s < counts[t] of each row; computed in `dtype`.

    query: data, scales, weights, as `mla.indexer.api.prepare_query` returns them. tables:
    owners, counts, block_tables.
    """
    owners, counts, block_tables = (table.tolist() for table in tables)
    queries, weights = query_values(rows, *query[:2]).to(dtype), query[2].to(dtype)
    for token, (owner, count) in enumerate(zip(owners, counts, strict=True)):
        if count:
            data, scales = key_bytes(rows, block_tables[owner], count)
            keys = dequantised(data, scales, rows.record).to(dtype)
            products = torch.relu(keys @ queries[token].T)
            out[token, :count] = (products @ weights[token]).to(out.dtype)


def query_values(rows: Rows, data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """fp32 [T, H, 128] of queries as they are stored. The scale of a whole head is in the weights,
    not here."""
    element = index_format(rows.record.name).element
    return dequantised(data, scales, rows.record) if element == "e2m1" else data.float()


def key_bytes(rows: Rows, blocks: list[int], count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(data, scales) uint8 [count, ...] of the keys of a request."""
    slots = blocks[: -(-count // rows.rows)]
    data, scales = (x[slots].flatten(0, 1)[:count] for x in (rows.data(), rows.scales()))
    return data, scales


def select(
    scores: torch.Tensor,
    counts: torch.Tensor,
    k: int,
    tables: tuple[torch.Tensor, torch.Tensor, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(entries int64 [T, k], chosen int32 [T]); tables: owners, block tables, entries of a block.

    Of scores[t, :counts[t]] the k largest, of equal ones the first, a NaN below all numbers; in the
    order of candidates. Their numbers, or with tables their entries; behind them -1.
    """
    entries = torch.full((len(scores), k), -1, dtype=torch.int64, device=scores.device)
    chosen = counts.clamp(0, scores.shape[1]).clamp(max=k).to(torch.int32)
    for row, count in enumerate(counts.clamp(0, scores.shape[1]).tolist()):
        values = scores[row, :count].double()
        # Least significant key first: stable sorts keep the order of equal candidates.
        order = values.nan_to_num(-torch.inf, torch.inf, -torch.inf).argsort(
            descending=True, stable=True
        )
        order = order[values[order].isnan().byte().argsort(stable=True)]
        best = order[:k].sort().values
        entries[row, : len(best)] = (
            best if tables is None else numbers_for_gather(best, row, tables)
        )
    return entries, chosen


def numbers_for_gather(
    candidates: torch.Tensor, row: int, tables: tuple[torch.Tensor, torch.Tensor, int]
) -> torch.Tensor:
    """Numbers for `gather` of candidates of a row; -1 of those that the block table has not."""
    owners, block_tables, size = tables
    blocks = block_tables[int(owners[row])].long()
    pages = candidates // size
    known = pages < len(blocks)
    found = blocks[pages.clamp(max=len(blocks) - 1)] * size + candidates % size
    return torch.where(known & (found >= 0), found, -1)
