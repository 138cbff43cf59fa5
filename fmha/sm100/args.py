"""Bundles that travel between the kernel and its roles, with the shape of every field.

Frozen dataclasses: the DSL flattens them into the same PTX as separate arguments.
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32

from kernelkit.pipelines import Event, Ring


@dataclass(frozen=True)
class TmaLoad:
    """One kind of tile that TMA fetches."""

    atom: cute.CopyAtom
    tensor: cute.Tensor  # coordinates: Q, K (S, D, H, B); V (D, S, H, B)
    layout: cute.ComposedLayout  # of the shared buffer: (MMA, rest, rest, stage), swizzled


@dataclass(frozen=True)
class Outputs:
    """Global memory that the kernel writes, and the lengths that it reads."""

    o: cute.Tensor  # (Sq, D, Hq, B), io dtype or fp32
    lse: cute.Tensor  # (Sq, Hq, B), fp32
    row_max: cute.Tensor | None  # (Sq, Hq, B), fp32, with raw O only
    kv_lens: cute.Tensor | None  # (B,), int32, valid keys


@dataclass(frozen=True)
class Work:
    """What one CTA computes: 128 query rows of one head."""

    q_tile: Int32
    head: Int32
    kv_head: Int32
    batch: Int32
    q_length: Int32
    kv_length: Int32  # valid keys
    kv_tiles: Int32  # key tiles that any row sees; walked from the last to the first
    masked_tiles: Int32  # how many of them, at the end, need a mask per element
    scale_log2: Float32  # softmax scale times log2(e)


@dataclass(frozen=True)
class Row:
    """What a softmax thread owns."""

    thread: Int32  # row in the tile = lane of TMEM
    position: Int32  # row in Q; rows beyond Sq exist only on chip
    visible: Int32  # the row sees keys [0, visible); not positive: none


@dataclass(frozen=True)
class Buffers:
    """On-chip memory of the CTA."""

    q: cute.Tensor  # (MMA, 1, D / 16, 1) io dtype, shared, swizzled
    k: cute.Tensor  # (MMA, 1, D / 16, stages)
    v: cute.Tensor  # (MMA, 1, tile_n / 16, stages)
    tmem: cute.Pointer  # fp32, start of the tensor memory allocation


@dataclass(frozen=True)
class Pipes:
    """The edges of the plan as barriers."""

    q: Event
    k: Ring
    v: Ring
    s: Event
    p: Event
    o: Event


@dataclass(frozen=True)
class Lane:
    """What a softmax thread works with, the same for all tiles."""

    row: Row
    scores: cute.Tensor  # (tile_n,) fp32 registers: the row of S, then its weights
    scale_log2: Float32
    buffers: Buffers
    pipes: Pipes
