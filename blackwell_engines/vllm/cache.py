"""vLLM's cache of a layer as K and V in pages, and writes to it.

vLLM hands out [blocks, kv_heads, block_size, 2 head_size]: K in the first columns of a row, V in
the others, in whatever order of memory its `KVCacheLayout` says. Both are read in place.
"""

from __future__ import annotations

import torch

from kvcache.movement.api import append_pages

BLOCK_SIZES = (16, 32, 64, 128)  # that both attentions read
CACHE_DTYPES = {
    "auto": None,  # that of the model
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
}


def unknown_dtype(cache_dtype: str | None) -> str:
    """Why a cache of this dtype, by vLLM's name, is refused."""
    reason = "; of 8 bits, kernels read e4m3 alone" if str(cache_dtype).startswith("fp8") else ""
    return f"kv_cache_dtype {cache_dtype!r}: one of {[*CACHE_DTYPES]}{reason}"


def pages_of(
    kv_cache: torch.Tensor, head_size: int, cache_dtype: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Views K and V [blocks, block_size, kv_heads, head_size] of a layer's cache.

    Args:
        kv_cache: [blocks, kv_heads, block_size, 2 head_size]; fp8 as bytes or as e4m3.
        cache_dtype: vLLM's name, one of `CACHE_DTYPES`.

    Raises:
        NotImplementedError: for another dtype. ValueError: for a cache of another shape.
    """
    if cache_dtype not in CACHE_DTYPES:
        raise NotImplementedError(unknown_dtype(cache_dtype))
    if kv_cache.ndim != 4 or kv_cache.shape[-1] != 2 * head_size:
        raise ValueError(
            f"kv_cache {tuple(kv_cache.shape)}, expected [blocks, kv_heads, block_size, "
            f"{2 * head_size}]"
        )
    dtype = CACHE_DTYPES[cache_dtype]
    if dtype is not None and kv_cache.dtype != dtype:
        if kv_cache.itemsize != dtype.itemsize:
            raise ValueError(f"kv_cache is {kv_cache.dtype}, but kv_cache_dtype is {cache_dtype!r}")
        kv_cache = kv_cache.view(dtype)
    k, v = kv_cache.transpose(1, 2).split(head_size, dim=-1)
    return k, v


def write(
    pages: tuple[torch.Tensor, torch.Tensor],
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Write new tokens to pages, K and V by one launch, quantised where pages are e4m3; by a launch
    for each head where heads have scales of their own.

    Args:
        key, value: [T or more, kv_heads, head_size], any stride between tokens and heads.
        slots: int64 [T], block * block_size + row, or -1 for tokens of padding.
        k_scale, v_scale: fp32 with one element or [kv_heads], what pages in e4m3 are multiplied by.

    Raises:
        TypeError, ValueError, NotImplementedError: what `kvcache.append_pages` raises.
    """
    if pages[0].dtype == key.dtype:
        k_scale = v_scale = None
    if k_scale is None or v_scale is None or k_scale.numel() == v_scale.numel() == 1:
        append_pages(*pages, key, value, slots, k_scale=k_scale, v_scale=v_scale)
        return
    for head in (slice(n, n + 1) for n in range(key.shape[1])):
        k, v, k_new, v_new = (x[..., head, :] for x in (*pages, key, value))
        append_pages(k, v, k_new, v_new, slots, k_scale=k_scale[head], v_scale=v_scale[head])
