"""`norm_rope_append`: what a layer does between its projections, in one launch.

Devices, `backend`, `arch` and what is refused: as in `kvcache.movement.api`, for every compute
capability from 8.0 on. Nothing waits for a GPU; each call can be captured in a graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kernelkit.call.front import fronted
from kernelkit.call.tensors import require_strided, require_type
from kvcache.checks import require
from kvcache.layouts.latent import NEIGHBOURS
from kvcache.layouts.records import Record
from kvcache.layouts.rows import Rows
from mla.glue.arguments import Index, Keys, LowRankRows, QueryHeads
from mla.glue.config import STORED
from mla.glue.launch import NORM_ROPE_APPEND
from mla.indexer.formats import FORMATS, PLAIN, Rotation

__all__ = ["IndexKeys", "LatentKeys", "LowRank", "Queries", "norm_rope_append"]

OTHER_NAMES = {"is_neox": "pairs", "is_neox_style": "pairs", "slot_mapping": "keys.slots"}


@dataclass(frozen=True)
class LatentKeys:
    """Latent keys of T tokens: RMSNorm of the first 512 columns, RoPE of the last 64, a record.

    The result is rounded to bf16 once, after RoPE; the record is encoded from that, bit for bit as
    `mla.attention.codec` does.

    x: bf16 [T, 576], the output of kv_a_proj (DeepSeek-V3, V3.2, Kimi K2, GLM-5), or [T, 512] of
        DeepSeek-V4's kv_proj, whose norm covers the RoPE columns, too.
    rows: the cache, written in place. `kvcache.Rows` of FP8_656 or a bf16 record of 1,152 bytes
        (576 columns), of FP8_584, FP8_528 or BF16_512 (512); or [pages, page_size, columns] in
        bf16, or in float8_e4m3fn with 576 columns. Entries of a page are side by side.
    slots: int32 or int64 [T], page * page_size + row of each token. Any number that is no entry,
        such as -1, writes nothing; no entry twice.
    weight: bf16 or fp32 [512].
    eps: of the norm.
    scale: fp32 [1] of a cache in e4m3, above 0: x * (1 / scale) is stored. None: 1.
    """

    x: torch.Tensor
    rows: Rows | torch.Tensor
    slots: torch.Tensor
    weight: torch.Tensor
    eps: float = 1e-6
    scale: torch.Tensor | None = None


@dataclass(frozen=True)
class IndexKeys:
    """Keys of the indexer of T tokens: LayerNorm, RoPE, Hadamard transform, a record.

    The result is rounded to bf16 once, after the transform; the record is encoded from that, bit
    for bit as `mla.indexer.quantised` does. `mla.scores` reads it.

    x: bf16 [T, 128].
    rows: `kvcache.Rows` of INDEXER_FP8, INDEXER_FP4 or INDEXER_BF16, written in place.
    slots: as of `LatentKeys`.
    weight, bias: bf16 or fp32 [128], both of one dtype.
    eps: of the norm.
    rotation: see `mla.indexer.formats`: `V32` of DeepSeek-V3.2, `GLM5` of GLM-5. Queries need the
        same one (`mla.prepare_query`).
    """

    x: torch.Tensor
    rows: Rows
    slots: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    eps: float = 1e-6
    rotation: Rotation = PLAIN


@dataclass(frozen=True)
class Queries:
    """Queries of T tokens and H heads: RoPE of the last 64 columns, perhaps after an RMSNorm.

    q: bf16 [T, H, columns]. Without eps only the last 64 columns are read: q can be the output of
        q_b_proj, or queries whose latent columns are already there.
    out: bf16 [T, H, columns] where the same columns are written, the last 64 of perhaps other rows;
        None writes q.
    eps: of an RMSNorm over all 512 columns of a head, without weight (DeepSeek-V4); None: no norm.
    """

    q: torch.Tensor
    out: torch.Tensor | None = None
    eps: float | None = None


@dataclass(frozen=True)
class LowRank:
    """Low-rank queries of T tokens: RMSNorm between q_a_proj and q_b_proj.

    x: bf16 [T, rank], a multiple of 8 up to 4,096.
    weight: bf16 or fp32 [rank].
    out: bf16 [T, rank]; None writes x.
    eps: of the norm.
    """

    x: torch.Tensor
    weight: torch.Tensor
    out: torch.Tensor | None = None
    eps: float = 1e-6


@fronted(OTHER_NAMES)
def norm_rope_append(
    positions: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor],
    *,
    keys: LatentKeys | None = None,
    index_keys: IndexKeys | None = None,
    queries: Queries | None = None,
    low_rank: LowRank | None = None,
    pairs: str = NEIGHBOURS,
    pdl: bool = False,
    backend: str = "auto",
    arch: str | None = None,
) -> None:
    """Normalise, rotate, cast and append rows of T tokens between the projections of a layer.

    All parts that are given take one launch, without a workspace; give those whose projections are
    done. `mla.glue.reference` is the definition, bit for bit. Norms are computed in fp32:
    x * (1 / sqrt(mean(x^2) + eps)) * weight, as in vLLM's fused_q_kv_rmsnorm and DeepSeek-V4 in
    transformers. Last dimensions are contiguous, other strides multiples of 16 bytes.

    Args:
        positions: int32 or int64 [T], rows of the tables. On a GPU others count as the first or the
            last row; on the CPU they raise ValueError where something would be written.
        rope: (cos, sin), fp32 [positions, 32], the halves of vLLM's cos_sin_cache for example.
        keys: latent keys, normalised, rotated and written to a cache.
        index_keys: keys of the indexer, written to its cache.
        queries: queries, rotated.
        low_rank: low-rank queries, normalised.
        pairs: 'neighbours' (GPT-J, elements 2 i and 2 i + 1: DeepSeek, Kimi, GLM) or 'halves'
            (NeoX, i and i + 32), of keys and queries.
        pdl: programmatic dependent launch; from compute capability 9.0 on.
        backend, arch: see `kernelkit.call.launch.choose_target`.

    Raises:
        NotImplementedError: for e4m3 on compute capabilities 8.0, 8.6 and 8.7, and for a record
            without a kernel (FP4_288).
        TypeError, ValueError: naming the value and the limit, before anything is compiled.
    """
    NORM_ROPE_APPEND(fields(
        positions, rope, keys=keys, index_keys=index_keys, queries=queries, low_rank=low_rank,
        pairs=pairs, pdl=pdl, backend=backend, arch=arch,
    ))  # fmt: skip


def fields(
    positions: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor],
    *,
    keys: LatentKeys | None = None,
    index_keys: IndexKeys | None = None,
    queries: Queries | None = None,
    low_rank: LowRank | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Convert arguments of `norm_rope_append` to fields of `arguments.Arguments`."""
    if not isinstance(rope, tuple | list) or len(rope) != 2:
        raise TypeError(f"rope is {type(rope).__name__}, expected two tables (cos, sin)")
    given = {"positions": positions, "cos": rope[0], "sin": rope[1], **options}
    if keys is not None:
        given["keys"] = _keys(keys)
    if index_keys is not None:
        given["index"] = _index(index_keys, given.get("keys"))
    if queries is not None:
        given["queries"] = heads_of(queries)
    if low_rank is not None:
        require("low_rank", low_rank, LowRank)
        require_type("low_rank.x", low_rank.x, torch.Tensor)
        out, x = _in_place(low_rank.x, low_rank.out)
        given["low_rank"] = LowRankRows(out, low_rank.weight, x, low_rank.eps)
    return given


def heads_of(queries: Queries) -> QueryHeads:
    """Return the fields of an operator."""
    require("queries", queries, Queries)
    require_type("queries.q", queries.q, torch.Tensor)
    return QueryHeads(*_in_place(queries.q, queries.out), queries.eps)


def _in_place(
    x: torch.Tensor, out: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (out, x), with None for x if both are the same."""
    return (x, None) if out is None or out is x else (out, x)


def _keys(keys: LatentKeys) -> Keys:
    """Return the fields of the operator."""
    require("keys", keys, LatentKeys)
    rows, others = keys.rows, (keys.slots, keys.weight, keys.eps, keys.scale)
    if isinstance(rows, torch.Tensor):
        require_strided(**{"keys.rows": rows})
        store = rows.squeeze(2) if rows.ndim == 4 and rows.shape[2] == 1 else rows
        return Keys(keys.x, store, *others)
    require("keys.rows", rows, Rows)
    _require_record("keys", rows.record, STORED)
    places = rows.record.name, rows.rows, rows.data_offset, rows.scale_offset
    return Keys(keys.x, rows.pool, *others, *places)


def _index(index: IndexKeys, keys: Keys | None) -> Index:
    """Return the fields of the operator. keys: those of the latent keys, perhaps of one pool."""
    require("index_keys", index, IndexKeys)
    rows = index.rows
    require("index_keys.rows", rows, Rows)
    require("index_keys.rotation", index.rotation, Rotation)
    _require_record(
        "index_keys", rows.record, {name: form.record for name, form in FORMATS.items()}
    )
    shared = keys is not None and keys.pool is rows.pool
    return Index(
        index.x, index.slots, index.weight, index.bias, rows.record.name, rows.rows,
        None if shared else rows.pool, rows.data_offset, rows.scale_offset, index.eps,
        index.rotation,
    )  # fmt: skip


def _require_record(name: str, record: Record, known: dict[str, Record]) -> None:
    """Raise for a record that no kernel writes."""
    require(f"{name}.rows.record", record, Record)
    if known.get(record.name) != record:
        raise NotImplementedError(
            f"record {record.name} of {record.bytes} bytes: {name} are in one of {[*known]}"
        )
