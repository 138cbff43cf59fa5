"""Launch arguments of the decode kernels, by name from the host to traced code.

`gqa_lowlatency.launch` fills the fields with torch tensors and numbers,
`gqa_lowlatency.shared.signature` with those that a kernel is compiled for, and the kernels read
them as the DSL's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Tensor = Any  # torch.Tensor on the host, cute.Tensor in traced code
Number = Any  # int or float on the host, Int32 or Float32 in traced code


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """Tensors of one launch.

    q, o [B, T, Hq, D]; k, v [B, S, Hkv, D] or [pages, page, Hkv, D]; lse [B, Hq, T] fp32. The last
    dimension is contiguous, other strides of q, k, v and o are multiples of 16 bytes.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    lse: Tensor


@dataclass(frozen=True, kw_only=True)
class Tables:
    """Tables in global memory; None if the config does not use them.

    partial and counts: the workspace of `shared/finish.py`.
    """

    lens: Tensor | None = None  # int32 (B,)
    pages: Tensor | None = None  # int32 (B, pages of an entry)
    sinks: Tensor | None = None  # fp32 (Hq,)
    k_scale: Tensor | None = None  # fp32 (Hkv,)
    v_scale: Tensor | None = None  # fp32 (Hkv,)
    out_scale: Tensor | None = None  # fp32 (1,)
    partial: Tensor | None = None  # fp32 (units, parts, words of a part)
    counts: Tensor | None = None  # int32 (units,), zeros between launches
    first: Tensor | None = None  # int32 (B,)
    tree: Tensor | None = None  # int64 (B T,)


@dataclass(frozen=True, kw_only=True)
class Scalars:
    """Numbers of a launch.

    scale_log2: factor from q.k to a logit in log2 units; with softcap c it is 2 c log2(e).
    softcap_log2: factor from q.k to 2 s / c, with softcap only.
    left: keys visible before the token's position.
    sink_tokens: number of first keys that stay visible.
    """

    scale_log2: Number
    softcap_log2: Number
    left: Number
    sink_tokens: Number


@dataclass(frozen=True, kw_only=True)
class KernelArguments:
    """Arguments of one launch. parts: clusters that share a KV head, 1 unless the config has
    parts."""

    tensors: Tensors
    tables: Tables
    scalars: Scalars
    parts: Number
