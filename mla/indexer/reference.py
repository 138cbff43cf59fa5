"""Reference of the scores of index keys and of the selection, in plain torch.

    out[t, s] = s_key sum_h w[t, h] max(0, q[t, h] . k[s])      for s < counts[t]

Key s of token t is entry block_tables[b, s // E] * E + s % E of the rows, where b = owners[t] and E
is the number of entries in a slot. s_key is the scale of the key if one scale serves all its
elements, otherwise 1: the group scales of e2m1 are part of q . k. A result with a NaN among its
inputs is NaN, even if the product is not positive.
"""

from __future__ import annotations

import torch

from kernelkit.numerics.aligned_sums import aligned_product
from kvcache.layouts.rows import Rows
from mla.indexer.formats import index_format
from mla.indexer.quantised import dequantised, scale_values

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def scores(
    rows: Rows,
    query: Tensors,
    tables: Tensors,
    out: torch.Tensor,
    dtype: torch.dtype = torch.float64,
    *,
    cut: bool = False,
) -> None:
    """Write the scores of each row t, s < counts[t], to out [T, S]; compute in `dtype`.

    cut: whether q . k is cut off as a tensor core does it in e4m3.
    query: data, scales, weights, as `mla.indexer.api.prepare_query` returns them.
    tables: owners, counts, block_tables.
    """
    owners, counts, block_tables = (table.tolist() for table in tables)
    queries, weights = query_values(rows, *query[:2]).to(dtype), query[2].to(dtype)
    for token, (owner, count) in enumerate(zip(owners, counts, strict=True)):
        if count:
            data, scales = key_bytes(rows, block_tables[owner], count)
            if cut:
                scale = scale_values(scales, rows.record).to(dtype)
                elements = data.contiguous().view(torch.float8_e4m3fn).float()
                found = aligned_product(elements, queries[token].T, torch.float8_e4m3fn)
                products = torch.relu(found.to(dtype)) * scale
            else:
                keys = dequantised(data, scales, rows.record).to(dtype)
                products = torch.relu(keys @ queries[token].T)
            out[token, :count] = (products @ weights[token]).to(out.dtype)


def query_values(rows: Rows, data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the values of stored queries, fp32 [T, H, 128].

    A scale that serves a whole head is in the weights and is not applied here.
    """
    element = index_format(rows.record.name).element
    return dequantised(data, scales, rows.record) if element == "e2m1" else data.float()


def key_bytes(rows: Rows, blocks: list[int], count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (data, scales), uint8 [count, ...], of the keys of a request."""
    slots = blocks[: -(-count // rows.rows)]
    data, scales = (x[slots].flatten(0, 1)[:count] for x in (rows.data(), rows.scales()))
    return data, scales


def select(
    scores: torch.Tensor,
    counts: torch.Tensor,
    k: int,
    tables: tuple[torch.Tensor, torch.Tensor, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the k largest of scores[t, :counts[t]].

    Of equal scores the first ones are taken, and a NaN is below all numbers.

    tables: owners, block tables, entries of a block.

    Returns:
        (entries int64 [T, k], chosen int32 [T]). Each row of entries is in the order of candidates:
        their numbers, or with tables their entries, filled up with -1.
    """
    entries = torch.full((len(scores), k), -1, dtype=torch.int64, device=scores.device)
    chosen = counts.clamp(0, scores.shape[1]).clamp(max=k).to(torch.int32)
    for row, count in enumerate(counts.clamp(0, scores.shape[1]).tolist()):
        values = scores[row, :count].double()
        # A NaN sorts like -inf. Stable sorts keep the order of candidates among equals.
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
    """Return a row's candidates as numbers for `gather`; -1 for those not in the block table."""
    owners, block_tables, size = tables
    blocks = block_tables[int(owners[row])].long()
    pages = candidates // size
    known = pages < len(blocks)
    found = blocks[pages.clamp(max=len(blocks) - 1)] * size + candidates % size
    return torch.where(known & (found >= 0), found, -1)
