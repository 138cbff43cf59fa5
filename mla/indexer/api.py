"""The indexer: queries, scores and the best keys.

Devices, `backend`, `arch` and what is refused: as in `kvcache.movement.api`. Nothing waits for a
GPU; each call can be captured in a graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvcache.layouts.rows import Rows
from mla.indexer.formats import PLAIN, Rotation
from mla.indexer.query_launch import PREPARE_QUERY
from mla.indexer.scores_launch import SCORES
from mla.indexer.select_launch import SELECT

__all__ = ["IndexQuery", "prepare_query", "scores", "select"]


class IndexQuery(NamedTuple):
    """Index queries of T tokens and H heads, as the score kernels read them.

    data: uint8 [T, H, 64] in e2m1, uint8 [T, H, 128] in e4m3, or bfloat16 [T, H, 128].
    scales: uint8 [T, H, 4] of e2m1, else [T, H, 0].
    weights: fp32 [T, H]; those of e4m3 include the scale of their row.
    """

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
    rotation: Rotation = PLAIN,
    backend: str = "auto",
    arch: str | None = None,
) -> IndexQuery:
    """Prepare queries in the same way as the index keys of `record`: rotate, transform and
    quantise.

    The result is equal bit for bit to `mla.indexer.quantised`.

    Args:
        q: [T, H, 128], bfloat16 or float32, not rotated yet. The last dimension is contiguous,
            other strides are multiples of 16 bytes.
        weights: [T, H], bfloat16 or float32, with any strides.
        positions: int64 [T], the row of the tables for each token.
        cos, sin: fp32 [P, 32], the angles of every position.
        record: 'indexer_fp4', 'indexer_fp8' or 'indexer_bf16', the record of the keys.
        factor: factor that the weights are multiplied by, for example 128^-0.5 H^-0.5.
        rotation: that of the keys: the default of DeepSeek-V4's, `V32` or `GLM5` of
            `mla.indexer.formats` of DeepSeek-V3.2's and GLM-5's, or another one.
        backend, arch: see `kernelkit.call.launch.choose_target`.

    Returns:
        Data, scales and weights; those of INDEXER_FP8 are multiplied by the scale of their row.

    Raises:
        TypeError, ValueError, NotImplementedError: naming the value and the limit.
    """
    given = {"q": q, "weights": weights, "positions": positions, "cos": cos, "sin": sin}
    given |= {"record": record, "factor": factor, "rotation": rotation}
    given |= {"backend": backend, "arch": arch}
    return IndexQuery(*PREPARE_QUERY(given))


def scores(
    rows: Rows,
    query: IndexQuery,
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
    """Compute out[t, s] = s_key sum_h weights[t, h] max(0, q[t, h] . k[s]) for s < counts[t].

    `mla.indexer.reference` is the definition. Elements of `out` from counts[t] on are not written.
    Sums are fp32; the order in which heads are added depends only on the kernel, so the bits of a
    score do not depend on the other tokens of the step. Kernel 'wgmma' multiplies in e4m3: the
    tensor core keeps 13 bits of q . k below its largest term (`kernelkit.numerics.aligned_sums`).

    Args:
        rows: keys, of INDEXER_FP4, INDEXER_FP8 or INDEXER_BF16. The number of rows in a page is a
            multiple of 8.
        query: data, scales and weights that `prepare_query` returns for that record; 16, 32, 64 or
            128 heads.
        owners: int32 [T], the request of each token. Neighbouring tokens of one request share the
            reads of its keys.
        counts: int32 [T], the number of keys that each token sees: (position + 1) // ratio.
        block_tables: int32 [B, blocks]: key s is row s % E of slot block_tables[owner, s // E].
        out: [T, S], float32 or bfloat16, the last dimension contiguous; written in place.
        longest: the largest number of tokens of one request in this call, for the grouping of
            tokens; it changes the speed and not the result.
        kernel: 'auto', 'warp' (mma.sync in 16 bits), 'wgmma' (INDEXER_FP8 on sm_90a), or 'tcgen05'
            (INDEXER_FP4 on sm_100a).
        backend, arch: see `kernelkit.call.launch.choose_target`.

    Raises:
        TypeError, ValueError, NotImplementedError: naming the value and the limit.
    """
    if not isinstance(query, tuple) or len(query) != len(IndexQuery._fields):
        raise TypeError(f"query is {type(query).__name__}, expected IndexQuery of three tensors")
    q, q_scales, weights = query
    SCORES({
        "rows": rows, "q": q, "q_scales": q_scales, "weights": weights, "owners": owners,
        "counts": counts, "block_tables": block_tables, "out": out, "longest": longest,
        "kernel": kernel, "backend": backend, "arch": arch,
    })  # fmt: skip


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
    """Select the k largest of scores[t, :counts[t]], as `mla.indexer.reference` defines it.

    The choice never depends on timing: of equal scores the first ones are taken (+0 equals -0), and
    a NaN is below all numbers.

    Args:
        scores: [T, S], float32 or bfloat16, with any number of candidates. The last dimension is
            contiguous; rows at multiples of 16 bytes are read faster. Scores from counts[t] on are
            not read.
        counts: int32 [T], up to S.
        k: from 1 to 2048.
        owners, block_tables: int32 [T] and int32 [B, blocks], both or neither. With them candidate
            s becomes the entry that `gather` reads, block_tables[owners[t], s // entries] * entries
            + s % entries, or -1 if the table has no such block. Without them it stays s.
        entries: rows in a block.
        backend, arch: see `kernelkit.call.launch.choose_target`.

    Returns:
        (entries int64 [T, k], chosen int32 [T]). Each row of entries is in the order of candidates
        and filled up with -1; chosen[t] is min(k, counts[t]).

    Raises:
        TypeError, ValueError, NotImplementedError: naming the value and the limit.
    """
    given = {"scores": scores, "counts": counts, "k": k, "entries": entries}
    given |= {"owners": owners, "block_tables": block_tables, "backend": backend, "arch": arch}
    return tuple(SELECT(given))
