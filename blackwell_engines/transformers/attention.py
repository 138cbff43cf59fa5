"""`attention_forward`: attention of a transformers model by our kernels.

One to eight new tokens are `gqa_lowlatency.decode`, where it knows the head dim and no entry has
pads on the right; all else is `fmha.attention`. There, with pads on the left, entries are packed,
without a copy of the keys: those of all entries are rows of one tensor, and those between are
entries without queries.
"""

from __future__ import annotations

from typing import Any

import torch

from blackwell_engines.transformers.masks import Sight, packed
from fmha.api import attention
from gqa_lowlatency.api import decode
from gqa_lowlatency.config import HEAD_DIMS, MAX_Q_TOKENS
from kernelkit.attention import SharedOptions

# Tensors that models hand to every layer, which attention has no use for.
UNUSED = {"position_ids", "cache_position", "num_items_in_batch"}


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Sight | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The interface of attention of transformers.

    Args:
        module: the layer; its is_causal decides where attention_mask is None.
        query: [B, Hq, S, D], bfloat16 or float16; key, value: [B, Hkv, K, D] as the cache returns
            them, in any layout whose last dimension is contiguous.
        attention_mask: what `keys_in_sight` made for this forward. None is all keys, or, where the
            layer is causal and has as many keys as queries, those before.
        options: scaling, softcap, sliding_window, s_aux (sinks [Hq]), is_causal; dropout 0.

    Returns:
        (O [B, S, Hq, D], None). Rows that see no key are 0: pads on the left of a causal layer.

    Raises:
        TypeError, ValueError, NotImplementedError: naming the value and the limit, for masks of
            other kinds, dropout, wanted weights, tensors that no kernel takes, and what kernels
            refuse, gradients among it.
    """
    sight = _sight(module, query, key, attention_mask, options)
    _refuse(sight, options)
    given: SharedOptions = {
        "softcap": options.get("softcap"), "sinks": options.get("s_aux"),
        "scale": options.get("scaling"),
    }  # fmt: skip
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    if _decodes(sight, q, v):
        given |= {"window": sight.left, "kv_lens": sight.end}
        return decode(q, k, v, first_keys=sight.first, **given), None
    window = None if (sight.left, sight.right) == (None, None) else (sight.left, sight.right)
    given["window"] = window
    if sight.first is not None:
        return _left_padded(sight, q, k, v, given), None
    given["kv_lens"] = sight.end
    return attention(q, k, v, q_offset=sight.start, **given), None


def _sight(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    mask: object,
    options: dict[str, Any],
) -> Sight:
    """Return what the mask lets see, on the device of the layer; sizes are compared."""
    sizes = query.shape[0], query.shape[2], key.shape[2]
    if mask is None:
        causal = options.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        if causal and sizes[1] != sizes[2]:
            raise ValueError(
                f"no attention_mask for {sizes[1]} queries and {sizes[2]} keys of a causal layer: "
                "the positions of the queries are not known"
            )
        return Sight(*sizes, None, 0 if causal else None)
    if not isinstance(mask, Sight):
        shape = tuple(mask.shape) if isinstance(mask, torch.Tensor) else ""
        raise NotImplementedError(
            f"attention_mask is {type(mask).__name__} {shape}: only padding [B, S] that is given "
            "to the model is supported, no custom mask for pairs of query and key"
        )
    if (mask.batch, mask.queries, mask.keys) != sizes:
        raise ValueError(
            f"{sizes[0]} entries of {sizes[1]} queries and {sizes[2]} keys, but the mask is of "
            f"{mask.batch}, {mask.queries} and {mask.keys}"
        )
    return mask.to(query.device)


def _refuse(sight: Sight, options: dict[str, Any]) -> None:
    """Raise for what would be left out."""
    dropout, window = options.get("dropout"), options.get("sliding_window")
    if dropout:
        raise NotImplementedError(f"dropout {dropout}: 0, the kernels have none; call model.eval()")
    if options.get("output_attentions"):
        raise NotImplementedError("output_attentions: attention weights are not stored; use eager")
    if window is not None and sight.left != window - 1:
        seen = "all" if sight.left is None else sight.left + 1
        raise ValueError(f"sliding_window {window}, but the mask shows {seen} keys")
    for name, value in options.items():
        if isinstance(value, torch.Tensor) and name not in {"s_aux", *UNUSED}:
            raise NotImplementedError(f"{name} {tuple(value.shape)}: not supported by the kernels")


def _decodes(sight: Sight, q: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether the queries are the newest keys, few, and of a head dim that `decode` knows."""
    few = sight.queries <= MAX_Q_TOKENS and sight.newest and sight.right == 0
    return few and q.shape[-1] == v.shape[-1] and q.shape[-1] in HEAD_DIMS


def _left_padded(
    sight: Sight, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: SharedOptions
) -> torch.Tensor:
    """[B, S, Hq, D], with entries that begin behind pads."""
    (keys, pitch), (values, pitch_v) = _rows(k), _rows(v)
    if pitch_v != pitch:  # laid out in two ways, as they are before any cache
        (keys, pitch), (values, _) = _rows(k.contiguous()), _rows(v.contiguous())
    tables = packed(sight, pitch)
    o = attention(
        q.flatten(0, 1), keys, values, max_seqlen_q=sight.queries, **vars(tables), **given
    )
    return o.unflatten(0, q.shape[:2])


def _rows(keys: torch.Tensor) -> tuple[torch.Tensor, int]:
    """[B, S, H, D] as [rows, H, D] in the same memory, and the rows from entry to entry: more than
    S where heads lie behind each other; their rows are then the same bytes, at other heads."""
    batch, length, heads, columns = keys.shape
    apart, step, over_heads, _ = keys.stride()
    if apart % step or apart < length * step:
        keys = keys.contiguous()
        apart, step, over_heads, _ = keys.stride()
    pitch = apart // step
    rows = (batch - 1) * pitch + length
    return keys.as_strided((rows, heads, columns), (step, over_heads, 1)), pitch
