"""Bundles that travel between the kernels and their roles, with the shape of every field, and the
DSL's types of dtypes.

Frozen dataclasses: the DSL flattens them into the same PTX as separate arguments.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from fmha.kernel_arguments import Scalars, Tables
from kernelkit.device.boxes import TmaTensor
from kernelkit.device.pipelines import Event, Ring

IO_TYPES = {
    "bf16": cutlass.BFloat16,
    "fp16": cutlass.Float16,
    "e4m3": cutlass.Float8E4M3FN,
}
OUT_TYPES = IO_TYPES | {"fp32": cutlass.Float32}


@dataclass(frozen=True)
class TmaTensors:
    """q and o: modes ((head of a group, row), column, group, batch entry).

    tail is v with another barrier: in a pair its bytes are counted in this CTA, not in the leader.
    v is None where it is k.
    """

    q: TmaTensor
    k: TmaTensor
    v: TmaTensor | None
    tail: TmaTensor | None
    o: TmaTensor


@dataclass(frozen=True)
class Inputs:
    """What threads fetch themselves, where TMA does not."""

    q: cute.Tensor  # (row, D, Hq, B); B is 1 where rows are packed (varlen)
    k: cute.Tensor  # (row, D, Hkv, B), or pages instead of entries
    v: cute.Tensor  # (row, Dv, Hkv, B)


@dataclass(frozen=True)
class Order:
    """In which order all CTAs, or pairs, take all query blocks.

    A section is all blocks of some heads, heads of all entries counted together; the last one may
    have fewer. Of `near` heads the blocks of one place among the queries follow each other.
    """

    rounds: cute.FastDivmodDivisorV2  # of a section
    section: Int32  # heads of it
    near: cute.FastDivmodDivisorV2
    near_blocks: cute.FastDivmodDivisorV2  # blocks of so many heads
    last: Int32  # number of the last section
    last_near: cute.FastDivmodDivisorV2  # the same of the last section
    last_near_blocks: cute.FastDivmodDivisorV2
    heads: cute.FastDivmodDivisorV2  # query heads of an entry, KV heads where they share tiles
    group: cute.FastDivmodDivisorV2  # of them those that read one KV head
    blocks: Int32  # of a head
    last_rounds: Int32  # of the last section, in which every CTA or pair takes a block
    left: Int32  # blocks that are left then, fewer than CTAs or pairs


@dataclass(frozen=True)
class Globals:
    """Global memory beside TMA: what threads read and write themselves."""

    q_rows: Int32
    k_rows: Int32  # or of a page
    o: cute.Tensor  # (row, Dv, Hq, B) output dtype; B is 1 where rows are packed (varlen)
    lse: cute.Tensor  # (row, Hq, B) fp32
    row_max: cute.Tensor | None  # (row, Hq, B) fp32, with raw O only
    tables: Tables
    order: Order


@dataclass(frozen=True)
class Walk:
    """The key tiles of one query block in the order in which they are visited, numbered from the
    first key that a row sees.

    First those with a mask per element: `right` tiles from `right_end` - 1 down, `left` tiles from
    `left_end` - 1 down, `sink` tiles of the first keys. Then `free` tiles from `free_end` - 1 down,
    in which every row sees every key. Order means nothing to the softmax, and so two copies of its
    loop are enough.
    """

    origin: Int32  # key with which tile 0 begins
    right: Int32
    right_end: Int32
    left: Int32
    left_end: Int32
    sink: Int32
    free: Int32
    free_end: Int32
    masked: Int32  # right + left + sink
    seen_end: Int32  # first key behind all that any row sees
    tiles: Int32  # masked + free


@dataclass(frozen=True)
class Work:
    """What a CTA (or pair) computes at a time: a block of query tiles.

    All rows read the same KV head.
    """

    q_block: Int32
    head: Int32  # query head of the block, or group of heads that share its tiles
    kv_head: Int32
    batch: Int32  # entry; tensors that are packed have no batch of their own
    q_start: Int32  # row of the tensor where this entry's queries begin: 0, or by cu_seqlens
    q_length: Int32  # queries (tokens) of this entry
    kv_start: Int32
    kv_length: Int32  # valid keys
    offset: Int32  # position of the entry's first query among the keys
    full_end: Int32  # end of what a row sees whose right edge does not depend on it
    rank: Int32  # of this CTA in its pair; 0 without one


@dataclass(frozen=True)
class Row:
    """A query row."""

    token: Int32  # query of the entry; rows at and beyond q_length exist only on chip
    head: Int32  # query head
    begin: Int32  # the row sees keys [begin, end), and those of [0, sink_end) below end
    end: Int32
    sink_end: Int32


@dataclass(frozen=True)
class Buffers:
    """On-chip memory of the CTA: pointers to the buffers of the plan, None for those that it does
    without."""

    q: cute.Pointer  # io dtype, panels of (rows, panel) lines
    k: cute.Pointer
    v: cute.Pointer
    o: cute.Pointer  # output dtype, panels
    p: cute.Pointer | None = None
    statistics: cute.Pointer | None = None  # fp32
    tmem: cute.Pointer | None = None  # fp32, start of the tensor memory allocation
    vt: cute.Pointer | None = None  # V turned, panels of (column, keys) lines


@dataclass(frozen=True)
class Pipes:
    """The edges of the plan as barriers, None for those that it does without."""

    q: Ring
    k: Ring
    v: Ring
    s: Event | None = None
    p: Event | None = None
    p_tail: Event | None = None
    o: Ring | None = None
    row: Ring | None = None
    out: Ring | None = None
    tail: Ring | None = None
    terms: Event | None = None
    vt: Ring | None = None


@dataclass(frozen=True)
class Prologue:
    """What the prologue leaves to every role."""

    smem: cute.Pointer
    tma: TmaTensors
    tensors: Globals
    scalars: Scalars
    pipes: Pipes


@dataclass(frozen=True)
class Scope:
    """What every role of a CTA may reach."""

    tma: TmaTensors
    tensors: Globals
    scalars: Scalars
    buffers: Buffers
    pipes: Pipes


@dataclass(frozen=True)
class Lane:
    """A thread's place in its query tile."""

    team: Int32  # which of the warpgroups that compute
    tile: Int32  # which of the CTA's query tiles
    part: Int32  # of that tile: keys whose S, columns whose O it computes
    first_row: Int32  # of the tile; the other is 8 rows further
    warp: Int32  # of the warpgroup
    column: Int32  # its first one; the next is its neighbour, and so on every 8
    rows: tuple[Row, Row]
    real: tuple[Boolean, Boolean]  # whether the entry has them; others hold anything
