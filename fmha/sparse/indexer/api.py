"""The indexer: queries, scores and the best keys, and the torch operators behind them.

Devices, `backend`, `arch` and what is refused: as in `kvcache.movement.api`. Nothing waits for a
GPU; each call can be captured in a graph.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fmha.sparse.indexer import query_forward, select_forward
from fmha.sparse.indexer.scores_api import scores
from kernelkit.schema import register_operator
from kernelkit.tensors import require_no_grad

PLACE = "str backend='auto', str? arch=None"
PREPARE_QUERY = (
    "(Tensor q, Tensor weights, Tensor positions, Tensor cos, Tensor sin, *, str record, "
    f"float factor=1.0, {PLACE}) -> (Tensor, Tensor, Tensor)"
)

SELECT = (
    "(Tensor scores, Tensor counts, Tensor? owners, Tensor? block_tables, *, int k, int entries=1, "
    f"{PLACE}) -> (Tensor, Tensor)"
)

__all__ = ["IndexQuery", "prepare_query", "scores", "select"]


class IndexQuery(NamedTuple):
    """data: uint8 [T, H, 64] of e2m1, [T, H, 128] e4m3 or bfloat16. scales: uint8 [T, H, 4] of
    e2m1, else [T, H, 0]. weights: fp32 [T, H], those of e4m3 times the scale of their row."""

    data: torch.Tensor
    scales: torch.Tensor
    weights: torch.Tensor


def prepare_query(
    q: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    record: str = "indexer_fp4",
    factor: float = 1.0,
    backend: str = "auto",
    arch: str | None = None,
) -> IndexQuery:
    """Queries as index keys of `record` are: rotated, transformed, quantised, bit for bit as
    `fmha.sparse.indexer.quantised` defines it.

    q: [T, H, 128], bfloat16 or float32; the last 64 elements are not rotated yet. The last
        dimension is contiguous, other strides are multiples of 16 bytes.
    weights: [T, H], bfloat16 or float32, with any strides; multiplied by `factor` (128^-0.5 H^-0.5,
        say), and for INDEXER_FP8 then by the scale of their row.
    positions: int64 [T], of each token, in the tables. cos, sin: float32 [P, 32].
    record: 'indexer_fp4', 'indexer_fp8' or 'indexer_bf16', that of the keys.
    """
    require_no_grad(q=q, weights=weights)
    place = {"backend": backend, "arch": arch}
    tensors = q, weights, positions, cos, sin
    return IndexQuery(*prepare_query_op(*tensors, record=record, factor=factor, **place))


def select(
    scores: torch.Tensor,
    counts: torch.Tensor,
    k: int,
    *,
    owners: torch.Tensor | None = None,
    block_tables: torch.Tensor | None = None,
    entries: int = 1,
    backend: str = "auto",
    arch: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(entries int64 [T, k], chosen int32 [T]): of scores[t, :counts[t]] the k largest, in the
    order of candidates; behind them -1. chosen[t] is min(k, counts[t]).

    Of equal scores (+0 and -0 are equal) the first ones are taken, a NaN is below all numbers:
    the result is that of `fmha.sparse.indexer.reference_select`, and never depends on timing.

    scores: [T, S], float32 or bfloat16, of any number of candidates; the last dimension is
        contiguous, rows at multiples of 16 bytes are read faster. What is behind counts[t] is not
        looked at.
    counts: int32 [T], up to S. k: up to 2048.
    owners, block_tables: int32 [T] and int32 [B, blocks], both or neither: candidate s becomes the
        entry `gather` knows, block_tables[owners[t], s // entries] * entries + s % entries, with
        `entries` rows in a block; without them s itself. A block that the table has not is -1.
    """
    require_no_grad(scores=scores)
    place = {"backend": backend, "arch": arch}
    return tuple(select_op(scores, counts, owners, block_tables, k=k, entries=entries, **place))


# -- operators ------------------------------------------------------------------------------------


def _prepare_query(q: torch.Tensor, *tensors: torch.Tensor, **options: Any) -> tuple:
    weights, positions, *rope = tensors
    return query_forward.run_prepare_query(q, weights, positions, tuple(rope), **options)


def _fake_prepare_query(q: torch.Tensor, *tensors: torch.Tensor, **options: Any) -> tuple:
    return query_forward.query_outputs(q, options["record"])


prepare_query_op = register_operator(
    "kv_prepare_query", PREPARE_QUERY, _prepare_query, _fake_prepare_query
)


def _select(
    scores: torch.Tensor,
    counts: torch.Tensor,
    owners: torch.Tensor | None,
    block_tables: torch.Tensor | None,
    *,
    k: int,
    entries: int = 1,
    **place: Any,
) -> tuple:
    if (owners is None) != (block_tables is None):
        raise ValueError("owners and block_tables: both or neither")
    paging = None if owners is None else (owners, block_tables, entries)
    return select_forward.run_select(scores, counts, k, paging, **place)


def _fake_select(scores: torch.Tensor, *tensors: torch.Tensor, **options: Any) -> tuple:
    return select_forward.select_outputs(scores, options["k"])


select_op = register_operator("kv_index_select", SELECT, _select, _fake_select)
