"""Bundles passed between the kernels and their roles, with the shape of every field, and the DSL
types of dtypes.

Frozen dataclasses: the DSL flattens them into the same PTX as separate arguments.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from fmha.kernel_arguments import Scalars, Tables
from kernelkit.device.boxes import TmaTensor
from kernelkit.device.online_softmax import Branch
from kernelkit.device.pipelines import Event, Ring

IO_TYPES = {
    "bf16": cutlass.BFloat16,
    "fp16": cutlass.Float16,
    "e4m3": cutlass.Float8E4M3FN,
}
OUT_TYPES = IO_TYPES | {"fp32": cutlass.Float32}


@dataclass(frozen=True)
class TmaTensors:
    """TMA copies. q and o have modes ((head of a group, row), column, group, batch entry).

    tail is v with another barrier: in a pair its bytes are counted in this CTA, not in the leader.
    v is None if V is K.
    """

    q: TmaTensor
    k: TmaTensor
    v: TmaTensor | None
    tail: TmaTensor | None
    o: TmaTensor


@dataclass(frozen=True)
class Inputs:
    """Tensors that threads fetch themselves, without TMA."""

    q: cute.Tensor  # (row, D, Hq, B); B is 1 where rows are packed (varlen)
    k: cute.Tensor  # (row, D, Hkv, B), or pages instead of entries
    v: cute.Tensor  # (row, Dv, Hkv, B)


@dataclass(frozen=True)
class Order:
    """Order in which the CTAs, or pairs, compute the query blocks.

    A section is all blocks of some heads, over the heads of all entries; the last one may have
    fewer heads. Within `near` heads, blocks at the same query position are adjacent.
    """

    rounds: cute.FastDivmodDivisorV2  # of a section
    section: Int32  # heads of it
    near: cute.FastDivmodDivisorV2
    near_blocks: cute.FastDivmodDivisorV2  # blocks of so many heads
    last: Int32  # number of the last section
    last_near: cute.FastDivmodDivisorV2  # `near` of the last section
    last_near_blocks: cute.FastDivmodDivisorV2
    heads: cute.FastDivmodDivisorV2  # query heads of an entry, KV heads where they share tiles
    group: cute.FastDivmodDivisorV2  # `heads` that read one KV head
    blocks: Int32  # of a head
    last_rounds: Int32  # full rounds of the last section: every CTA or pair has a block
    left: Int32  # blocks left after them, fewer than CTAs or pairs


@dataclass(frozen=True)
class Globals:
    """Global memory that threads read and write themselves, without TMA."""

    q_rows: Int32
    k_rows: Int32  # or of a page
    o: cute.Tensor  # (row, Dv, Hq, B) output dtype; B is 1 where rows are packed (varlen)
    lse: cute.Tensor  # (row, Hq, B) fp32
    row_max: cute.Tensor | None  # (row, Hq, B) fp32, with raw O only
    tables: Tables
    order: Order


@dataclass(frozen=True)
class Lists:
    """Blocks of keys of one query block, where a block mask lists them."""

    partial: cute.Tensor  # (N,) numbers of blocks that are seen in part
    partial_count: Int32
    full: cute.Tensor  # (N,) numbers of blocks that are seen as a whole
    full_count: Int32


@dataclass(frozen=True)
class Walk:
    """Key tiles of one query block in the order of the visits.

    Tiles are numbered from the first key that a row sees. First come tiles with a mask per element:
    `right` tiles from `right_end` - 1 down, `left` tiles from `left_end` - 1 down, `sink` tiles of
    the first keys. Then `free` tiles from `free_end` - 1 down, in which every row sees every key.
    The softmax does not depend on the order, so two copies of its loop are enough.

    With a block mask the tiles are those of listed blocks instead: `masked` tiles of blocks that
    are seen in part, then `free` tiles of blocks that are seen as a whole.
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
    seen_end: Int32  # end of the keys that any row sees
    tiles: Int32  # masked + free
    lists: Lists | None = None


@dataclass(frozen=True)
class Work:
    """Query block that a CTA (or pair) computes at a time.

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
    full_end: Int32  # end of the visible keys if the right edge does not depend on the row
    rank: Int32  # of this CTA in its pair; 0 without one
    lists: Lists | None = None  # with a block mask


@dataclass(frozen=True)
class Spot:
    """Arguments of a row for a function of positions, see `fmha.mods`."""

    batch: Int32  # entry
    head: Int32  # query head
    position: Int32  # of the query among the keys of its entry, at least 0


@dataclass(frozen=True)
class Row:
    """Position of a query row, and the keys that it sees."""

    token: Int32  # query of the entry; rows at and beyond q_length exist only on chip
    head: Int32  # query head
    begin: Int32  # the row sees keys [begin, end), and those of [0, sink_end) below end
    end: Int32
    sink_end: Int32
    branch: Branch | None  # of the newest keys, those that the row sees; None for all
    spot: Spot | None  # None without functions of positions


@dataclass(frozen=True)
class Buffers:
    """Pointers to the on-chip buffers of the plan; None for a buffer that the config
    does not use.
    """

    q: cute.Pointer  # io dtype, panels of (rows, panel) lines
    k: cute.Pointer
    v: cute.Pointer
    o: cute.Pointer  # output dtype, panels
    p: cute.Pointer | None = None
    statistics: cute.Pointer | None = None  # fp32
    tmem: cute.Pointer | None = None  # fp32, start of the tensor memory allocation
    vt: cute.Pointer | None = None  # V transposed, panels of (column, keys) lines


@dataclass(frozen=True)
class Pipes:
    """Barriers of the edges of the plan; None for an edge that the config does not use."""

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
    """Objects that the prologue passes to every role."""

    smem: cute.Pointer
    tma: TmaTensors
    tensors: Globals
    scalars: Scalars
    pipes: Pipes


@dataclass(frozen=True)
class Scope:
    """Objects that every role of a CTA may use."""

    tma: TmaTensors
    tensors: Globals
    scalars: Scalars
    buffers: Buffers
    pipes: Pipes


@dataclass(frozen=True)
class Lane:
    """Position of a thread in its query tile."""

    team: Int32  # which computing warpgroup
    tile: Int32  # which of the CTA's query tiles
    part: Int32  # of that tile: keys whose S, columns whose O it computes
    first_row: Int32  # of the tile; the other is 8 rows further
    warp: Int32  # of the warpgroup
    column: Int32  # first column; the thread has two adjacent columns of every 8
    rows: tuple[Row, Row]
    real: tuple[Boolean, Boolean]  # whether the entry has the rows; other rows hold anything
