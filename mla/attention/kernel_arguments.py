"""Launch arguments of the attention kernels, by name from the host to traced code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Tensor = Any  # torch.Tensor on the host, cute.Tensor in traced code
Number = Any  # int or float on the host, Int32 or Float32 in traced code


@dataclass(frozen=True, kw_only=True)
class Source:
    """A cache and how query entries name their keys in it, see `config.Keys`.

    store: bf16 or e4m3 [pages, rows, columns] of a plain record, else uint8 [slots, slot_bytes].
    places: int32 or int64 [N, k], entries of the cache; or int32 [N, pages], pages.
    counts: int32 [N], keys of an entry; None for all k.
    data_offset, scale_offset: byte of a slot where data and scales of row 0 begin; 0 if plain.
    """

    store: Tensor
    places: Tensor
    counts: Tensor | None
    data_offset: Number
    scale_offset: Number


@dataclass(frozen=True, kw_only=True)
class Tables:
    """Tables in global memory; None if the config does not use them.

    partial and counts: workspace of clusters that share an entry.
    """

    sinks: Tensor | None = None  # fp32 (H,)
    cos: Tensor | None = None  # fp32 (positions, rope / 2)
    sin: Tensor | None = None
    positions: Tensor | None = None  # int64 (N,), rows of cos and sin
    key_scale: Tensor | None = None  # fp32 (1,)
    partial: Tensor | None = None  # fp32 (units, parts, words)
    counts: Tensor | None = None  # int32 (units,), zeros between launches


@dataclass(frozen=True, kw_only=True)
class KernelArguments:
    """Arguments of one launch.

    q [N, T, H, columns] and o [N, T, H, 512] bf16, lse fp32 [N, T, H], natural log.
    keys, extra: sources of keys.
    scale_log2: factor from q.k to a logit in log2 units.
    parts: clusters that share an entry, 1 unless the config has parts.
    """

    q: Tensor
    o: Tensor
    lse: Tensor
    keys: Source
    extra: Source | None
    tables: Tables
    scale_log2: Number
    parts: Number
