"""Launch arguments of the attention kernels, by name from the host to traced code.

`fmha.launch` fills the fields with torch tensors and numbers, `fmha.shared.host.example_arguments`
with those that a kernel is compiled for. `fmha.shared.host` reads them as the DSL's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Tensor = Any  # torch.Tensor on the host, cute.Tensor in traced code
Number = Any  # int or float on the host, Int32 or Float32 in traced code


@dataclass(frozen=True, kw_only=True)
class Tables:
    """Tables in global memory; None if the config does not use them."""

    kv_lens: Tensor | None = None  # (B,) valid keys
    q_offset: Tensor | None = None  # (B,) position of the first query
    cu_seqlens_q: Tensor | None = None  # (B + 1,)
    cu_seqlens_k: Tensor | None = None  # (B + 1,)
    page_table: Tensor | None = None  # (B, pages per entry)
    tree: Tensor | None = None  # (queries of all entries,) int64, see `fmha.attention`
    sinks: Tensor | None = None  # (Hq,) fp32
    cos: Tensor | None = None  # (positions, rope_dim / 2) fp32
    sin: Tensor | None = None
    q_scale: Tensor | None = None  # (Hq,) fp32
    k_scale: Tensor | None = None  # (Hkv,)
    v_scale: Tensor | None = None  # (Hkv,)
    out_scale: Tensor | None = None  # (1,) fp32
    block_counts: Tensor | None = None  # [B, H, query blocks], see `fmha.blocks.BlockLists`
    block_indices: Tensor | None = None  # [B, H, query blocks, N]
    full_counts: Tensor | None = None
    full_indices: Tensor | None = None
    block_order: Tensor | None = None  # [B, H, query blocks]
    mask_mod: tuple[Tensor, ...] = ()  # tables of the functions, see `fmha.mods`
    score_mod: tuple[Tensor, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Scalars:
    """Numbers of one launch.

    scale_log2: factor of a score inside exp2. Without softcap the score is q.k and the factor is
    scale * log2(e). With softcap the score is -1 / (1 + exp(2 scale q.k / c)) and the factor is
    2 c log2(e), see `kernelkit.device.online_softmax.softcap_scores`. With a score_mod the score is
    what the function returns and the factor is log2(e).
    """

    scale_log2: Number
    softcap_log2: Number  # 2 scale log2(e) / c with softcap, scale with a score_mod
    window_left: Number
    window_right: Number
    sink_tokens: Number


@dataclass(frozen=True, kw_only=True)
class KernelArguments:
    """Arguments of one launch.

    q [B, Sq, Hq, D], k, v [B, Skv, Hkv, D], o: the last dimension is contiguous, other strides are
    multiples of 16 bytes. Packed tensors have B = 1, paged ones [page, row, head, dim].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    lse: Tensor  # [B, Hq, Sq] fp32
    row_max: Tensor | None  # [B, Hq, Sq] fp32, with raw O only
    tables: Tables
    scalars: Scalars
    longest: Number  # queries of the longest entry
    section: Number  # heads of a section, see `fmha.shared.args.Order`
    near: Number  # heads of a section whose blocks alternate
    places: Number  # CTAs, or pairs, that run at once
