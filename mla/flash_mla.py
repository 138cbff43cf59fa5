"""`get_mla_metadata`, `flash_mla_with_kvcache`, `flash_mla_sparse_fwd`: FlashMLA's signatures.

Names, positions, defaults and results are those of FlashMLA and of SGLang's sgl-flash-mla 1.0.0;
docs/from_flashmla.md has the differences. Attention is `mla.decode`, `mla.sparse_decode` or
`mla.sparse_prefill`, in one launch. One more marks tokens without keys in the LSE: FlashMLA
returns +inf for them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from kernelkit.call.tensors import require_rank, require_type, require_types
from kernelkit.plan.log2 import LOG2_E
from kvcache.layouts.rows import Rows
from mla.attention.api import decode, sparse_decode, sparse_prefill
from mla.attention.codec import RECORDS
from mla.attention.formats import LATENT

Results = tuple[torch.Tensor, torch.Tensor]

BYTES = {RECORDS[name].bytes: name for name in ("fp8_656", "fp8_584", "fp8_528", "fp4_288")}
# kv_format -> record
FORMATS = {"V32": "fp8_656", "V4": "fp8_584", "V41": "fp8_528", "V41_FP4": "fp4_288"}
ONE_BYTE = (torch.float8_e4m3fn, torch.uint8, torch.int8)


@dataclass(frozen=True)
class FlashMLASchedMeta:
    """Stands for FlashMLA's schedule of a step, and holds nothing.

    Our kernels take lengths from the device at each launch, so one object serves any calls.
    """


def get_mla_metadata(*args: object, **kwargs: object) -> tuple[FlashMLASchedMeta, None]:
    """Return (schedule, None) for `flash_mla_with_kvcache`.

    Args:
        args, kwargs: anything, as of FlashMLA: older releases made a schedule from them.
    """
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool | None = None,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    enable_batch_invariant: bool = False,
    use_legacy: bool = False,
    kv_format: str | None = None,
    descale_q: torch.Tensor | None = None,
    descale_k: torch.Tensor | None = None,
) -> Results:
    """Attend to a paged cache: dense by `block_table`, sparse if `indices` are given.

    Args:
        q: bf16 [B, T, H, 576], or 512 for the sparse records of 584, 528 and 288 bytes.
        k_cache: [pages, page_size, 1, 576] in bf16 or e4m3, or [pages, page_size, 1, record bytes]
            in float8_e4m3fn, uint8 or int8.
        block_table, cache_seqlens: int32 [B, pages] and [B]; unused with indices, as in FlashMLA.
        head_dim_v: 512.
        tile_scheduler_metadata, num_splits: as `get_mla_metadata` returns them.
        is_fp8_kvcache: None takes it from the dtype of k_cache.
        indices, extra_indices_in_kvcache: int32 [B, T, k], page * page_size + row.
        topk_length, extra_topk_length: int32 [B].
        attn_sink: fp32 [H], below +inf.
        use_legacy: either value; FlashMLA chooses between two sets of kernels by it.
        kv_format: 'V32', 'V4', 'V41' or 'V41_FP4', checked against the bytes of k_cache.
        descale_q: None. descale_k: fp32 [1], of a dense cache in e4m3.

    Returns:
        (O, LSE): bf16 [B, T, H, 512], and fp32 [B, H, T] in natural log, +inf without keys.

    Raises:
        TypeError, ValueError, NotImplementedError: naming the argument.
    """
    require_types(q=q, k_cache=k_cache)
    require_rank("q", q, "[B, T, H, columns]")
    _require_schedule(tile_scheduler_metadata, num_splits, head_dim_v)
    _require_dtype(k_cache, is_fp8_kvcache)
    if descale_q is not None:
        raise NotImplementedError("descale_q: q is bf16 here, give it scaled")
    given = {"scale": softmax_scale, "sinks": attn_sink, "batch_invariant": enable_batch_invariant}
    listed = {
        "topk_length": topk_length,
        "extra_k_cache": extra_k_cache,
        "extra_indices_in_kvcache": extra_indices_in_kvcache,
        "extra_topk_length": extra_topk_length,
        "kv_format": kv_format,
    }
    if indices is None:
        _require_none(listed, "indices, which is None")
        given |= {"kv_scale": descale_k, "causal": causal}
        return _marked(_dense(q, k_cache, block_table, cache_seqlens, given))
    _require_none({"descale_k": descale_k}, "dense attention, and indices are given")
    if causal:
        raise ValueError("causal=True with indices: list the entries that a token sees")
    return _marked(_sparse(q, k_cache, indices, listed, given))


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = LATENT,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    use_legacy: bool = False,
    return_log2_lse: bool | None = None,
) -> tuple[torch.Tensor, None, torch.Tensor | None]:
    """Attend to the entries that each of many tokens lists.

    Args:
        q: bf16 [T, H, D], D of 576 or 512.
        kv: bf16 [entries, 1, D].
        indices: int32 [T, 1, k]; a number that is no entry is skipped.
        sm_scale: multiplies q.k.
        d_v: 512.
        attn_sink: fp32 [H], below +inf.
        topk_length: int32 [T].
        use_legacy: either value, see `flash_mla_with_kvcache`.
        return_log2_lse: None: the LSE is in natural log; True: in base 2; False: it is None.

    Returns:
        (O, None, LSE): bf16 [T, H, 512], and fp32 [T, H], +inf without keys. FlashMLA's second
        result, the largest logit of each row, is not computed.

    Raises:
        TypeError, ValueError, NotImplementedError: naming the argument.
    """
    require_types(q=q, kv=kv, indices=indices)
    require_rank("kv", kv, "[entries, 1, columns]")
    require_rank("indices", indices, "[T, 1, k]")
    _require_columns("d_v", d_v)
    for name, tensor in (("kv", kv), ("indices", indices)):
        if tensor.shape[1] != 1:
            raise ValueError(f"{name} has {tensor.shape[1]} heads: latent entries have one")
    o, lse = _marked(
        sparse_prefill(
            q, kv, indices.squeeze(1), counts=topk_length, scale=sm_scale, sinks=attn_sink,
            return_lse=True,
        )
    )  # fmt: skip
    if return_log2_lse is False:
        return o, None, None
    return o, None, lse.mul_(LOG2_E) if return_log2_lse else lse


def _dense(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    table: torch.Tensor | None,
    lengths: torch.Tensor | None,
    given: dict[str, Any],
) -> Results:
    """Return (O, LSE) of `decode`."""
    for name, tensor in (("block_table", table), ("cache_seqlens", lengths)):
        if tensor is None:
            raise TypeError(f"{name} is None: dense attention needs it")
    return decode(q, k_cache, page_table=table, kv_lens=lengths, return_lse=True, **given)


def _sparse(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    listed: dict[str, Any],
    given: dict[str, Any],
) -> Results:
    """Return (O, LSE) of `sparse_decode`. listed: the arguments that belong to indices."""
    rows, extra = _cache("k_cache", k_cache, listed["kv_format"]), listed["extra_k_cache"]
    return sparse_decode(
        q, rows, indices,
        counts=_of_tokens("topk_length", listed["topk_length"], q),
        extra=None if extra is None else _cache("extra_k_cache", extra),
        extra_indices=listed["extra_indices_in_kvcache"],
        extra_counts=_of_tokens("extra_topk_length", listed["extra_topk_length"], q),
        return_lse=True, **given,
    )  # fmt: skip


def _cache(name: str, cache: torch.Tensor, kv_format: str | None = None) -> Rows | torch.Tensor:
    """Return a cache of FlashMLA as the rows of a pool over the same memory; bf16 as it is."""
    require_type(name, cache, torch.Tensor)
    require_rank(name, cache, "[pages, page_size, 1, bytes]")
    if cache.dtype not in ONE_BYTE:
        _require_none({"kv_format": kv_format}, f"records, and {name} is {cache.dtype}")
        return cache
    pages, size, heads, nbytes = cache.shape
    if heads != 1:
        raise ValueError(f"{name} has {heads} heads: latent entries have one")
    if nbytes not in BYTES:
        raise NotImplementedError(f"{name} has {nbytes} bytes of an entry: one of {[*BYTES]}")
    record = RECORDS[BYTES[nbytes]]
    if kv_format is not None and FORMATS.get(kv_format) != record.name:
        known = [each for each, stored in FORMATS.items() if stored == record.name]
        raise NotImplementedError(
            f"kv_format {kv_format!r} of {name} with {nbytes} bytes of an entry: supported is "
            f"{known[0]!r}"
        )
    inner = size <= 1 or cache.stride(1) == nbytes
    if cache.stride(3) != 1 or not inner:
        raise ValueError(f"{name} has strides {cache.stride()}: rows of a page are contiguous")
    pool = cache.view(torch.uint8).as_strided((pages, size * nbytes), (cache.stride(0), 1))
    scales = size * record.data_bytes if record.scale_bytes else 0
    return Rows(pool, 0, scales, size, record)


def _of_tokens(name: str, lengths: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    """Return lengths of the entries of a batch, [B], for each of their tokens, [B, T]."""
    if lengths is None:
        return None
    require_type(name, lengths, torch.Tensor)
    require_rank(name, lengths, "[B]")
    return lengths[:, None].expand(-1, q.shape[1]).contiguous()


def _marked(results: Results) -> Results:
    """Return results whose LSE is +inf instead of -inf where a token has no keys."""
    o, lse = results
    return o, lse.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=math.inf)


def _require_schedule(schedule: object, num_splits: object, head_dim_v: int) -> None:
    """Raise for what `get_mla_metadata` does not return, and for another head dim of V."""
    if not isinstance(schedule, FlashMLASchedMeta):
        raise TypeError(
            f"tile_scheduler_metadata is {type(schedule).__name__}: it is what get_mla_metadata of "
            f"{__name__} returns"
        )
    _require_none({"num_splits": num_splits}, "older releases of FlashMLA")
    _require_columns("head_dim_v", head_dim_v)


def _require_columns(name: str, columns: int) -> None:
    """Raise ValueError for another number of columns of V than 512."""
    if columns != LATENT:
        raise ValueError(f"{name} {columns}: V has {LATENT} columns")


def _require_dtype(k_cache: torch.Tensor, is_fp8: bool | None) -> None:
    """Raise ValueError if the dtype of the cache is not what the caller says."""
    if is_fp8 is not None and is_fp8 != (k_cache.dtype in ONE_BYTE):
        raise ValueError(f"is_fp8_kvcache={is_fp8}, and k_cache is {k_cache.dtype}")


def _require_none(given: dict[str, Any], where: str) -> None:
    """Raise ValueError for an argument that another one excludes."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name} belongs to {where}")
