"""Attention of a layer over the batch of a step: at most one launch for what is decoded and one for
the rest, and one more that lays keys side by side where no prefill reads them in place. Scales of
FP8 caches are checked before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from blackwell_engines.engines.step import Gathered, Step
from fmha.api import attention
from gqa_lowlatency.api import decode
from gqa_lowlatency.config import HEAD_DIMS, MAX_Q_TOKENS
from kernelkit.attention import SharedOptions
from kernelkit.plan.limits import FLT_MAX
from kvcache.movement.api import gather_pages

ADVICE = (
    "the checkpoint sets no scale for this layer's FP8 cache. Use a checkpoint with calibrated "
    "scales, let the engine calculate them, or choose another dtype for the cache"
)


def cache_scales(layer: object, **scales: float) -> tuple[float, ...]:
    """Return the scales of a layer's FP8 cache.

    Args:
        layer: the layer's name or number, for the message.
        scales: by name; engines use -1.0 for a scale that was not in the checkpoint.

    Raises:
        ValueError: for a scale that is not positive and finite.
    """
    for name, scale in scales.items():
        if not 0 < scale <= FLT_MAX:
            raise ValueError(
                f"layer {layer}: {name} is {scale}, expected a positive finite number: {ADVICE}"
            )
    return tuple(map(float, scales.values()))


@dataclass(frozen=True)
class Scores:
    """Options of a layer's scores.

    scale: factor of q.k
    window: keys seen before the query's position, None for all
    softcap: None or 0 for none
    sinks: fp32 [Hq]
    k_scale, v_scale: fp32 [Hkv], for pages in e4m3
    out_scale: fp32 with one element, the divisor of an O in e4m3
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    out_scale: torch.Tensor | None = None

    def options(self) -> SharedOptions:
        """Options of `decode` and `attention` but for the masks."""
        return {
            "scale": self.scale, "softcap": self.softcap or None, "sinks": self.sinks,
            "k_scale": self.k_scale, "v_scale": self.v_scale, "out_scale": self.out_scale,
        }  # fmt: skip


def decodes(
    tokens: int, columns: int, value_columns: int, *, causal: bool = True, window: int | None = None
) -> bool:
    """Whether `gqa_lowlatency.decode` knows so many tokens, these head dims, and the masks: it
    bounds no window on the right, which may not end before the last token."""
    seen = causal or window is None or tokens <= window + 1
    return seen and tokens <= MAX_Q_TOKENS and columns == value_columns and columns in HEAD_DIMS


def attend(
    step: Step,
    q: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    scores: Scores,
    fresh: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Attention of new tokens over pages that hold them already.

    Nothing here reads a tensor of the GPU, so a CUDA graph captures it; lengths and tables may then
    change in place. A window of a step that is not causal is as wide behind a token as before it.

    Args:
        q: [tokens, Hq, D], those of `step` and perhaps more behind them, any stride between tokens.
        pages: K [pages, page_size, Hkv, D] and V [pages, page_size, Hkv, Dv], any strides but for
            the last.
        fresh: K [tokens, Hkv, D] and V [.., Dv] of the step's packed tokens, where these see no
            others: then no key is read from pages. Scales are of pages, and not of these.
        out: [tokens, Hq, Dv], where O is written; rows behind those of `step` are left.

    Raises:
        TypeError, ValueError, NotImplementedError: what `decode` and `attention` raise.
    """
    for _ in _launched(step, q, pages, out, scores, fresh):
        pass


def attend_with_lse(
    step: Step,
    q: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    scores: Scores,
    fresh: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """As `attend`; returns the LSE, fp32 [Hq, tokens of `step`] in natural log, sinks included."""
    found = [
        lse.transpose(0, 1).flatten(1) if lse.ndim == 3 else lse
        for lse in _launched(step, q, pages, out, scores, fresh)
    ]
    return torch.cat([q.new_empty((q.shape[1], 0), dtype=torch.float32), *found], 1)


def _launched(
    step: Step,
    q: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    scores: Scores,
    fresh: tuple[torch.Tensor, torch.Tensor] | None,
) -> Iterator[torch.Tensor]:
    """Launch; yield the LSE of what is decoded, [requests, Hq, tokens], and of the packed tokens,
    [Hq, tokens]."""
    (k, v), begun = pages, step.requests * step.tokens
    window, causal = scores.window, step.causal
    wide = window if causal else (window, window)
    if begun:
        shape, options = (step.requests, step.tokens), scores.options()
        batch, o = (tensor[:begun].unflatten(0, shape) for tensor in (q, out))
        options |= {
            "kv_lens": step.seq_lens[: step.requests], "page_table": step.table[: step.requests],
        }  # fmt: skip
        if decodes(step.tokens, k.shape[-1], v.shape[-1], causal=causal, window=window):
            options["window"] = window
            bound = _rounded(step.bound, step.table.shape[1] * k.shape[1])
            yield decode(
                batch, k, v, causal=causal, max_kv_len=bound, out=o, return_lse=True, **options
            )[1]
        else:
            options["window"] = wide
            yield attention(batch, k, v, causal=causal, out=o, return_lse=True, **options)[1]
    if step.rest:
        queries = slice(begun, begun + step.rest)
        options, starts = scores.options() | {"window": wide}, None
        if fresh is not None:
            (k, v), starts = (x[queries] for x in fresh), step.starts
            if k.dtype != pages[0].dtype:
                options["k_scale"] = options["v_scale"] = None
        elif step.gathered is not None:
            (k, v), starts = side_by_side(step.gathered, pages), step.gathered.starts
        else:
            options["kv_lens"] = step.seq_lens[step.requests :]
            options["page_table"] = step.table[step.requests :]
        yield attention(
            q[queries], k, v, causal=causal, cu_seqlens_q=step.starts, cu_seqlens_k=starts,
            max_seqlen_q=step.longest, out=out[queries], return_lse=True, **options,
        )[1]  # fmt: skip


def _rounded(bound: int, capacity: int) -> int:
    """The next power of two that tables have room for: a call with a number that is new costs the
    host more than one that it knows, and clusters are chosen by it."""
    return min(1 << max(bound - 1, 0).bit_length(), capacity)


def side_by_side(
    gathered: Gathered, pages: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """K [keys, Hkv, D] and V [keys, Hkv, Dv] of all requests: a copy, by one launch."""
    rows = gathered.slots.shape[0]
    k, v = (x.new_empty((rows, *x.shape[2:])) for x in pages)
    gather_pages(*pages, gathered.slots, k, v)
    return k, v
