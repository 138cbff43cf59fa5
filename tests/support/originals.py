"""Functions of FlashAttention, FlashInfer, FlashMLA and vLLM as their documentation defines them.

All compute in fp64.

The arguments are those of the libraries, except those that no call in the guides uses. `MODULES`
has the modules that call sites import.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

Results = tuple[torch.Tensor, torch.Tensor]


def _entry(q, k, v, scale, causal, window, softcap) -> Results:
    """Return O [n_q, H, D] and LSE [n_q, H] (natural log) of an entry.

    Causal masks and windows are aligned at the bottom right.
    """
    n_q, n_k, group = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k)
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(n_k) - (torch.arange(n_q)[:, None] + n_k - n_q)
    left, right = window[0], 0 if causal else window[1]
    hidden = torch.zeros(n_q, n_k, dtype=torch.bool)
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    scores = scores.masked_fill(hidden, -math.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -math.inf, 0)[..., None]).exp()
    return torch.einsum("hqk,khd->qhd", weights, v), lse.T


def _paged(cache: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
    """Return the first `length` rows of the pages, [length, heads, D]."""
    size = cache.shape[1]
    return cache[pages[: -(-length // size)].long()].flatten(0, 1)[:length]


# ---- FlashAttention


def flash_attn_func(
    q, k, v, *, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    return_attn_probs=False, q_descale=None, k_descale=None, v_descale=None,
):  # fmt: skip
    """Attend over dense entries; the factors [B, Hkv] of e4m3 are those of FlashAttention 3."""
    group, found = q.shape[2] // k.shape[2], []
    for entry, tensors in enumerate(zip(q, k, v, strict=True)):
        factors = [
            1.0 if each is None else each[entry].double()[:, None]
            for each in (q_descale, k_descale, v_descale)
        ]
        if q_descale is not None:
            factors[0] = factors[0].repeat_interleave(group, 0)
        scaled = (x.double() * factor for x, factor in zip(tensors, factors, strict=True))
        found.append(_entry(*scaled, softmax_scale, causal, window_size, softcap))
    out, lse = (torch.stack(each) for each in zip(*found, strict=True))
    return (out, lse.transpose(1, 2), None) if return_attn_probs else out


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    """Attend with packed queries over keys that are packed or in pages; LSE is [H, T]."""
    assert max_seqlen_q >= cu_seqlens_q.diff().max()
    assert max_seqlen_k >= cu_seqlens_k.diff().max()
    found = []
    for entry, length in enumerate(cu_seqlens_k.diff().tolist()):
        rows = q[cu_seqlens_q[entry] : cu_seqlens_q[entry + 1]]
        if block_table is None:
            keys = [x[cu_seqlens_k[entry] : cu_seqlens_k[entry + 1]] for x in (k, v)]
        else:
            keys = [_paged(x, block_table[entry], length) for x in (k, v)]
        found.append(_entry(rows, *keys, softmax_scale, causal, window_size, softcap))
    out, lse = (torch.cat(each) for each in zip(*found, strict=True))
    return (out, lse.T, None) if return_attn_probs else out


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, *, cache_seqlens=None, cache_batch_idx=None,
    block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    num_splits=0, return_softmax_lse=False,
):  # fmt: skip
    """Write new keys to the cache from `cache_seqlens` on, in place, and attend; LSE is [B,
    H, S]."""
    assert num_splits >= 0
    table = block_table
    if table is None:
        rows = torch.arange(len(q)) if cache_batch_idx is None else cache_batch_idx
        table = rows[:, None]
    size, found = k_cache.shape[1], []
    for entry, length in enumerate(cache_seqlens.tolist()):
        for cache, new in ((k_cache, k), (v_cache, v)):
            for place, row in enumerate(() if new is None else new[entry], start=length):
                cache[table[entry, place // size], place % size] = row
        length += 0 if k is None else k.shape[1]
        keys = (_paged(cache, table[entry], length) for cache in (k_cache, v_cache))
        found.append(_entry(q[entry], *keys, softmax_scale, causal, window_size, softcap))
    out, lse = (torch.stack(each) for each in zip(*found, strict=True))
    return (out, lse.transpose(1, 2)) if return_softmax_lse else out


# ---- FlashInfer, whose LSE has base 2


def get_seq_lens(kv_indptr, kv_last_page_len, page_size):
    return (kv_indptr.diff() - 1).clamp(min=0) * page_size + kv_last_page_len


def get_batch_indices_positions(append_indptr, seq_lens, nnz):
    """Return entries and positions of the last tokens of each entry."""
    indices, positions = [], []
    for entry, count in enumerate(append_indptr.diff().tolist()):
        length = int(seq_lens[entry])
        indices += [entry] * count
        positions += range(length - count, length)
    assert len(indices) == nnz
    return torch.tensor(indices).int(), torch.tensor(positions).int()


def _caches(kv_cache, layout):
    """Return K and V, [pages, page_size, heads, D]."""
    both = kv_cache.unbind(1) if isinstance(kv_cache, torch.Tensor) else kv_cache
    return [x.transpose(1, 2) if layout == "HND" else x for x in both]


def append_paged_kv_cache(
    append_key, append_value, batch_indices, positions, paged_kv_cache, kv_indices, kv_indptr,
    kv_last_page_len, *, kv_layout="NHD",
):  # fmt: skip
    caches = _caches(paged_kv_cache, kv_layout)
    size = caches[0].shape[1]
    for cache, new in zip(caches, (append_key, append_value), strict=True):
        for token, (entry, place) in enumerate(zip(batch_indices, positions, strict=True)):
            page = kv_indices[kv_indptr[entry] + place // size]
            cache[page, place % size] = new[token]


class _Wrapper:
    """The plan and run methods that both wrappers share."""

    def __init__(self, workspace, kv_layout="NHD", use_tensor_cores=False):
        self.layout = kv_layout

    def _plan(
        self, qo_indptr, lists, sizes, causal, window_left=-1, logits_soft_cap=None, **options: Any
    ):
        """Keep all arguments; `sizes` are heads, KV heads, head dim and page size."""
        self.qo_indptr, self.lists, self.sizes = qo_indptr, lists, sizes
        self.dtype = options.get("q_data_type", torch.float16)
        self.options = options.get("sm_scale"), causal, (window_left, -1), logits_soft_cap

    def run(self, q, kv_cache, return_lse=False):
        """Return O [T, H, D] and, if asked for, LSE [T, H]."""
        caches, (indptr, indices, last) = _caches(kv_cache, self.layout), self.lists
        kv_heads, head_dim = caches[0].shape[2:]
        assert self.sizes == (q.shape[1], kv_heads, head_dim, caches[0].shape[1])
        assert self.dtype == q.dtype
        found = []
        for entry in range(len(last)):
            rows = q[self.qo_indptr[entry] : self.qo_indptr[entry + 1]]
            pages = indices[indptr[entry] : indptr[entry + 1]]
            length = (len(pages) - 1) * self.sizes[3] + int(last[entry]) if len(pages) else 0
            keys = (_paged(cache, pages, length) for cache in caches)
            found.append(_entry(rows, *keys, *self.options))
        out, lse = (torch.cat(each) for each in zip(*found, strict=True))
        return (out, lse / math.log(2)) if return_lse else out


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *,
        q_len_per_req=1, **options: Any,
    ):  # fmt: skip
        sizes = num_qo_heads, num_kv_heads, head_dim, page_size
        starts = torch.arange(len(last_page_len) + 1) * q_len_per_req
        self._plan(starts, (indptr, indices, last_page_len), sizes, q_len_per_req > 1, **options)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads,
        num_kv_heads, head_dim_qk, page_size, *, causal=False, **options: Any,
    ):  # fmt: skip
        sizes = num_qo_heads, num_kv_heads, head_dim_qk, page_size
        lists = paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        self._plan(qo_indptr, lists, sizes, causal, **options)


def merge_states(v, s):
    """Merge v [T, n, H, D] and s [T, n, H], LSE of base 2."""
    total = torch.logsumexp(s.double() * math.log(2), 1) / math.log(2)
    weights = torch.exp2(s.double() - total[:, None])
    return (weights[..., None] * v.double()).sum(1), total


def merge_state(v_a, s_a, v_b, s_b):
    return merge_states(torch.stack((v_a, v_b), 1), torch.stack((s_a, s_b), 1))


# ---- vLLM


def fused_experts(
    hidden_states, w1, w2, topk_weights, topk_ids, global_num_experts=-1, expert_map=None
):
    """Compute the layer of experts: silu(gate) * up, where gate is the first half of the rows of
    w1.

    An expert of -1 adds nothing.
    """
    assert global_num_experts in (-1, len(w1) if expert_map is None else len(expert_map))
    x, out = hidden_states.double(), torch.zeros(hidden_states.shape, dtype=torch.float64)
    for token, slots in enumerate(zip(topk_ids.tolist(), topk_weights.tolist(), strict=True)):
        for expert, weight in zip(*slots, strict=True):
            local = expert if expert_map is None else int(expert_map[expert])
            if local >= 0:
                gate, up = (w1[local].double() @ x[token]).chunk(2)
                out[token] += weight * (w2[local].double() @ (F.silu(gate) * up))
    return out


# ---- FlashMLA, whose LSE is +inf for a token without keys


def get_mla_metadata(*args, **kwargs):
    """Return what a call passes on."""
    return None, None


def _latent(q, keys, scale, sink) -> Results:
    """Return O [H, 512] and LSE [H] of a token; `keys` are its own, [n, columns]."""
    scores = q.double() @ keys.double().T * (q.shape[-1] ** -0.5 if scale is None else scale)
    lse = scores.logsumexp(-1)
    if not len(keys):
        return torch.zeros(len(q), 512).double(), torch.full_like(lse, math.inf)
    every = lse if sink is None else torch.logaddexp(lse, sink.double())
    return (scores - every[:, None]).exp() @ keys[:, :512].double(), lse


def _entries_584(cache: torch.Tensor) -> torch.Tensor:
    """Return the entries of pages of 584-byte records, [pages * rows, 512]."""
    pages, rows, _, _ = cache.shape
    flat = cache.reshape(pages, -1)
    data = flat[:, : rows * 576].reshape(pages, rows, 576)
    scales = flat[:, rows * 576 :].reshape(pages, rows, 8)[..., :7].double()
    values = data[..., :448].contiguous().view(torch.float8_e4m3fn).double().unflatten(-1, (7, 64))
    values = (values * (2.0 ** (scales - 127))[..., None]).flatten(-2)
    rotary = data[..., 448:].contiguous().view(torch.bfloat16).double()
    return torch.cat((values, rotary), -1).flatten(0, 1)


def _chosen(entries, indices, length) -> torch.Tensor:
    """Return the entries that a token lists."""
    listed = indices if length is None else indices[:length]
    return entries[listed[(listed >= 0) & (listed < len(entries))].long()]


def _stacked(found: list[Results], lead: tuple[int, ...]) -> Results:
    return tuple(torch.stack(each).unflatten(0, lead) for each in zip(*found, strict=True))


def flash_mla_with_kvcache(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None,
    softmax_scale=None, *, causal=False, is_fp8_kvcache=False, indices=None, attn_sink=None,
    extra_k_cache=None, extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None,
):  # fmt: skip
    """Attend to pages of bf16, or to listed entries of 584 bytes; LSE is [B, H, T]."""
    (batch, tokens), found = q.shape[:2], []
    if indices is not None:
        sources = [(_entries_584(k_cache), indices, topk_length)]
        if extra_k_cache is not None:
            extra = _entries_584(extra_k_cache)
            sources.append((extra, extra_indices_in_kvcache, extra_topk_length))
    for entry in range(batch):
        for token in range(tokens):
            if indices is None:
                length = int(cache_seqlens[entry])
                own = _paged(k_cache, block_table[entry], length)[:, 0]
                keys = own[: max(length - (tokens - 1 - token) * causal, 0)]
            else:
                keys = torch.cat([
                    _chosen(entries, listed[entry, token], None if n is None else int(n[entry]))
                    for entries, listed, n in sources
                ])  # fmt: skip
            found.append(_latent(q[entry, token], keys, softmax_scale, attn_sink))
    out, lse = _stacked(found, (batch, tokens))
    return out, lse.transpose(1, 2)


def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None):
    """Attend to listed entries of bf16. The largest logits are not computed here."""
    lengths = [None] * len(q) if topk_length is None else topk_length.tolist()
    found = [
        _latent(row, _chosen(kv[:, 0], listed[0], length), sm_scale, attn_sink)
        for row, listed, length in zip(q, indices, lengths, strict=True)
    ]
    out, lse = _stacked(found, (len(q),))
    return out, None, lse


def _module(name: str, *members: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update({member.__name__: member for member in members})
    return module


MODULES = {
    module.__name__: module
    for module in (
        _module(
            "flash_attn", flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
        ),
        _module("flash_attn_interface", flash_attn_func),
        _module(
            "flashinfer", get_seq_lens, get_batch_indices_positions, append_paged_kv_cache,
            BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper, merge_state,
            merge_states,
        ),
        _module(
            "flash_mla", get_mla_metadata, flash_mla_with_kvcache, flash_mla_sparse_fwd
        ),
        _module("vllm.model_executor.layers.fused_moe", fused_experts),
    )
}  # fmt: skip
