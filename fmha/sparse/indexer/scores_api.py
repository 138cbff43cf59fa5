"""Scores of index keys and the torch operator behind them: `fmha.sparse.indexer.api` has the
rest."""

from __future__ import annotations

from typing import Any

import torch

from fmha.sparse.indexer.scores_config import RECORDS
from fmha.sparse.indexer.scores_forward import Tensors, run_scores
from kernelkit.schema import register_mutating_operator
from kernelkit.tensors import require_no_grad
from kvcache.layouts.records import Record
from kvcache.layouts.rows import Rows

SCORES = (
    "(Tensor pool, Tensor q, Tensor q_scales, Tensor weights, Tensor owners, Tensor counts, "
    "Tensor block_tables, Tensor(a!) out, *, int data_offset, int scale_offset, int rows, "
    "str record, int longest=1, str kernel='auto', str backend='auto', str? arch=None) -> ()"
)


def scores(
    rows: Rows,
    query: Tensors,
    owners: torch.Tensor,
    counts: torch.Tensor,
    block_tables: torch.Tensor,
    out: torch.Tensor,
    *,
    longest: int = 1,
    kernel: str = "auto",
    backend: str = "auto",
    arch: str | None = None,
) -> None:
    """out[t, s] = s_key sum_h weights[t, h] max(0, q[t, h] . k[s]), s < counts[t], as
    `fmha.sparse.indexer.reference` defines it; what is behind is not written.

    rows: keys, of INDEXER_FP4, INDEXER_FP8 or INDEXER_BF16; a multiple of 8 in a page.
    query: data, scales and weights as `prepare_query` makes them for that record; 16, 32, 64 or
        128 heads.
    owners: int32 [T], the request of each token. Those of a request that stand beside each other
        share what is read of its keys.
    counts: int32 [T], keys that each token sees: (position + 1) // ratio.
    block_tables: int32 [B, blocks]: key s is row s % E of slot block_tables[owner, s // E].
    out: [T, S], float32 or bfloat16, the last dimension contiguous.
    longest: the most tokens that a request has here, more than 1 or not: how tokens are grouped.
        A matter of speed, not of what is computed.
    kernel: 'auto', 'warp' (mma.sync in bf16), or 'tcgen05' (INDEXER_FP4 on sm_100a).

    Sums are fp32, in an order of heads that depends on the kernel alone: bits of a score do not
    depend on what else there is in the step.
    """
    require_no_grad(q=query[0], weights=query[2])
    options = {"data_offset": rows.data_offset, "scale_offset": rows.scale_offset}
    place = {"kernel": kernel, "backend": backend, "arch": arch}
    scores_op(
        rows.pool, *query, owners, counts, block_tables, out,
        **options, rows=rows.rows, record=rows.record.name, longest=longest, **place,
    )  # fmt: skip


def _scores(pool: torch.Tensor, *tensors: torch.Tensor, **options: Any) -> None:
    *query, owners, counts, block_tables, out = tensors
    name = options.pop("record")
    where = [options.pop(key) for key in ("data_offset", "scale_offset", "rows")]
    rows = Rows(pool, *where, RECORDS.get(name, Record(name, 1)))
    run_scores(rows, tuple(query), (owners, counts, block_tables), out, **options)


scores_op = register_mutating_operator("kv_index_scores", SCORES, _scores)
