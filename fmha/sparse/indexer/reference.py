"""Scores of index keys in plain torch: the definition that kernels are compared with.

    out[t, s] = s_key sum_h w[t, h] max(0, q[t, h] . k[s])      for s < counts[t]

Key s of token t is entry block_tables[b, s // E] * E + s % E of the rows, b = owners[t], E entries
in a slot. s_key is the scale of a key that has one for all its elements, otherwise 1: scales of
groups, of e2m1, are in q . k. What has a NaN in it is NaN, a product that is not positive too.
"""

from __future__ import annotations

import torch

from fmha.sparse.indexer.formats import index_format
from fmha.sparse.indexer.quantised import dequantised
from kvcache.layouts.rows import Rows

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def scores(
    rows: Rows,
    query: Tensors,
    tables: Tensors,
    out: torch.Tensor,
    dtype: torch.dtype = torch.float64,
) -> None:
    """Into out [T, S], s < counts[t] of each row; computed in `dtype`.

    query: data, scales, weights, as `fmha.sparse.indexer.api.prepare_query` returns them. tables:
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
