"""`warmup`: the kernels of a layer of an engine, compiled before its first request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import fmha.warm
import gqa_lowlatency.warm
from blackwell_engines.engines.limits import META, Layer
from fmha.arguments import Arguments
from gqa_lowlatency.arguments import Arguments as DecodeArguments
from gqa_lowlatency.config import MAX_Q_TOKENS
from kernelkit.call.tensors import DTYPE_NAMES
from kernelkit.compile.keys import KernelKey
from kernelkit.compile.warm import Progress, Warmed, warm
from kernelkit.merge.launch import KERNEL as MERGE_KERNEL
from kernelkit.merge.plan import MergeConfig, capacity_for, lanes_for
from kvcache.movement.launch import KERNELS, pages_config
from kvcache.movement.pages import AppendPages, GatherPages


@dataclass(frozen=True)
class Sizes:
    """Upper bounds of an engine's requests.

    q_heads, kv_heads: heads per rank
    requests: requests per batch
    tokens: new tokens per batch
    keys: keys per request
    drafts: tokens that a decoded request has in addition to its newest, at most
    ranks: ranks that share the keys of a request, see `blackwell_engines.vllm.context`
    """

    q_heads: int
    kv_heads: int
    requests: int
    tokens: int
    keys: int
    drafts: int = 0
    ranks: int = 1


def warmup(
    layer: Layer,
    sizes: Sizes,
    arch: str,
    *,
    written: bool = True,
    own_keys: bool = False,
    side_by_side: bool = False,
    paged: bool = True,
    progress: Progress | bool | None = None,
) -> Warmed:
    """Find or compile all kernels that `attend` can choose for a layer within these sizes, on any
    machine: with `BLACKWELL_KERNELS_CACHE` set a server finds them there.

    Args:
        layer: its group is ignored, and is q_heads / kv_heads.
        arch: such as 'sm_90a'.
        written: with the kernel that writes new keys to pages, as vLLM's plugin does.
        own_keys: with those of prompts that read their own keys alone, as SGLang's plugin does,
            and layers of encoders.
        side_by_side: prompts read keys that are gathered first, see
            `blackwell_engines.engines.limits`.
        paged: with those that read pages; an encoder has none.
        progress: see `kernelkit.compile.warm.warm`, as for what is returned.

    Raises:
        TypeError, ValueError, NotImplementedError: what the kernels refuse.
    """
    found: list[KernelKey] = []
    read, many = layer, sizes
    if sizes.ranks > 1:  # a rank reads its keys with the heads of all
        read = replace(layer, causal=False, sinks=False)
        many = replace(sizes, q_heads=sizes.q_heads * sizes.ranks)
        found.append(_merging(layer, arch))
        own_keys = True
    if paged:
        found += [*_decoding(read, many, arch), *_prompts(read, many, arch, side_by_side)]
    if own_keys:
        sinks = layer.sinks and sizes.ranks == 1
        own = replace(layer, kv_dtype=layer.dtype, sinks=sinks)
        found += _prompts(own, sizes, arch, side_by_side=True)
    if written or side_by_side:
        found += _moving(layer, sizes, arch, written, side_by_side)
    return warm(found, progress)


def _decoding(layer: Layer, sizes: Sizes, arch: str) -> Iterator[KernelKey]:
    batches, lengths = range(1, sizes.requests + 1), _powers(sizes.keys)
    for tokens in range(1, min(1 + sizes.drafts, MAX_Q_TOKENS) + 1):
        q = _empty((1, tokens, sizes.q_heads, layer.head_dim), layer.dtype)
        given = _paged(layer, sizes) | _out(layer, q.shape) | {"q": q, "arch": arch}
        if layer.decodes(tokens):
            # A table wide enough for the longest request, by which clusters are chosen.
            given["page_table"] = _empty((1, -(-sizes.keys // layer.page_size)), torch.int32)
            arguments = DecodeArguments(**given, **layer.decode_masks)
            yield from gqa_lowlatency.warm.kernels_for(arguments, batches, lengths)
        else:
            yield from fmha.warm.kernels_for(Arguments(**given, **layer.masks), batches, [tokens])


def _prompts(layer: Layer, sizes: Sizes, arch: str, side_by_side: bool) -> list[KernelKey]:
    q = _empty((1, sizes.q_heads, layer.head_dim), layer.dtype)
    given = _paged(layer, sizes) | layer.masks | {"q": q, "arch": arch}
    given |= _out(layer, q.shape) | {"cu_seqlens_q": _empty((2,), torch.int32)}
    if side_by_side:
        given |= {name: given[name][0] for name in ("k", "v")}
        given |= {"cu_seqlens_k": given["cu_seqlens_q"], "kv_lens": None, "page_table": None}
    batches, lengths = range(1, sizes.requests + 1), range(1, sizes.tokens + 1)
    return fmha.warm.kernels_for(Arguments(**given), batches, lengths)


def _merging(layer: Layer, arch: str) -> KernelKey:
    """What ranks read, and the new tokens over one another, by `kernelkit.merge.api.merge`."""
    dtype = DTYPE_NAMES[layer.dtype]
    sizes = {"capacity": capacity_for(2), "lanes": lanes_for(2, 1, layer.head_dim)}
    config = MergeConfig(
        layer.head_dim, (dtype,), dtype, raw=False, sinks=layer.sinks, stacked=False, **sizes
    )
    return KernelKey(MERGE_KERNEL, config, arch)


def _moving(
    layer: Layer, sizes: Sizes, arch: str, written: bool, side_by_side: bool
) -> Iterator[KernelKey]:
    """Kernels between tokens and pages whose rows begin at multiples of 16 bytes."""
    pages = _empty((1, layer.page_size, sizes.kv_heads, layer.head_dim), layer.kv_dtype)
    slots, shape = _empty((1,), torch.int64), (1, sizes.kv_heads, layer.head_dim)
    configs = []
    if written:
        x = _empty(shape, layer.dtype)
        scale = None if layer.kv_dtype == layer.dtype else _empty((), torch.float32)
        heads = slice(1 if layer.head_scales else None)  # a launch for each head, or one
        one, new = pages[:, :, heads], x[:, heads]
        configs.append(pages_config(AppendPages(one, one, new, new, slots, scale, scale)))
    if side_by_side:
        x = _empty(shape, layer.kv_dtype)
        configs.append(pages_config(GatherPages(pages, pages, x, x, slots)))
    for config in configs:
        yield KernelKey(f"kvcache.movement.{KERNELS[type(config)]}", config, arch)


def _paged(layer: Layer, sizes: Sizes) -> dict[str, Any]:
    """Arguments that decoding and prompts share."""
    shape = (1, layer.page_size, sizes.kv_heads, layer.head_dim)
    given: dict[str, Any] = {
        "k": _empty(shape, layer.kv_dtype),
        "v": _empty(shape, layer.kv_dtype),  # another memory: kernels ask whether K is V
        "kv_lens": _empty((1,), torch.int32),
        "page_table": _empty((1, 1), torch.int32),
        "softcap": 30.0 if layer.softcap else 0.0,
        "sinks": _empty((sizes.q_heads,), torch.float32) if layer.sinks else None,
    }
    if layer.kv_dtype != layer.dtype:
        scale = _empty((sizes.kv_heads,), torch.float32)
        given |= {"k_scale": scale, "v_scale": scale}
    return given


def _out(layer: Layer, shape: Sequence[int]) -> dict[str, torch.Tensor]:
    """Arguments that say what O is."""
    if layer.out_dtype is None:
        return {"out": _empty(shape, layer.dtype)}
    return {"out": _empty(shape, layer.out_dtype), "out_scale": _empty((1,), torch.float32)}


def _powers(most: int) -> Sequence[int]:
    """Bounds of lengths as `attend` rounds them."""
    return [*(1 << n for n in range(max(most - 1, 1).bit_length())), most]


def _empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)
