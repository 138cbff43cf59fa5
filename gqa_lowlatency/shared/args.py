"""Arguments of a launch as the kernels pass them on, with the shape of every field."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32


@dataclass(frozen=True)
class Tensors:
    """q, o [B, T, Hq, D]; k, v [B, S, Hkv, D] or [pages, page, Hkv, D]; lse [B, Hq, T] fp32."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    o: cute.Tensor
    lse: cute.Tensor


@dataclass(frozen=True)
class Tables:
    """None where the config has no use for it.

    partial and counts: the workspace of `device/finish.py`.
    """

    lens: cute.Tensor | None = None  # int32 (B,)
    pages: cute.Tensor | None = None  # int32 (B, pages of an entry)
    sinks: cute.Tensor | None = None  # fp32 (Hq,)
    k_scale: cute.Tensor | None = None  # fp32 (Hkv,)
    v_scale: cute.Tensor | None = None  # fp32 (Hkv,)
    partial: cute.Tensor | None = None  # fp32 (units, parts, words of a part)
    counts: cute.Tensor | None = None  # int32 (units,), zeros between launches
    first: cute.Tensor | None = None  # int32 (B,)


@dataclass(frozen=True)
class Scalars:
    """Numbers of a launch.

    scale_log2: q.k times this is a logit in log2 units; with softcap c it is 2 c log2(e), and
    softcap_log2 turns q.k into 2 s / c. left: keys seen before the own one; sink_tokens: the first
    keys.
    """

    scale_log2: Float32
    softcap_log2: Float32
    left: Int32
    sink_tokens: Int32


@dataclass(frozen=True)
class Place:
    """What a CTA works on; part (which cluster) and rank in it say which share of the keys."""

    entry: Int32
    head: Int32  # KV head
    row_tile: Int32
    part: Int32
    rank: Int32
