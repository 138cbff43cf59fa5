"""Bundles passed between the roles of the Hopper kernel, with the shape of every field."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Boolean, Int32

from kernelkit.device.boxes import TmaTensor
from kernelkit.device.pipelines import Event, Ring
from mla.attention.kernel_arguments import KernelArguments


@dataclass(frozen=True)
class Work:
    """Query rows and keys of a CTA.

    Tiles of keys are numbered over the sources, those of `extra` after those of `keys`.
    """

    entry: Int32
    tile: Int32  # of the entry's rows
    token: Int32  # first token of the tile
    head: Int32  # first head of the tile
    keys: Int32  # keys of the first source that any row of the entry sees
    extra: Int32  # keys of the second source
    own_tiles: Int32  # tiles of the first source that a row of this tile sees
    begin: Int32  # first tile of this CTA
    count: Int32  # its tiles
    active: Int32  # CTAs of all clusters that have tiles
    part: Int32  # cluster
    rank: Int32  # among the CTAs of the cluster that share the row tile
    sharer: Int32  # which of the row tiles of the cluster


@dataclass(frozen=True)
class Past:
    """Work that a CTA has done in earlier units."""

    fills: tuple[Int32, Int32]  # tiles that each buffer had
    units: Int32  # units with tiles


@dataclass(frozen=True)
class Pipes:
    """Edges of the plan."""

    left: Ring
    right: Ring
    p: Event


@dataclass(frozen=True)
class Buffers:
    """Shared memory: pointers of operands, addresses of words."""

    q: cute.Pointer  # bf16
    k: cute.Pointer  # bf16, both buffers
    q_full: cute.Pointer  # mbarrier
    rows: cute.Pointer  # fp32: maxima, then sums of even units, of odd units, each (row, team)
    valid: Int32  # a bit for each key of a tile, 64 for each buffer
    mail: Int32  # rows that others sent
    sent: Int32  # rows to send
    mail_full: Int32


@dataclass(frozen=True)
class Scope:
    """What every role gets."""

    q: TmaTensor  # modes (head, column, token, entry)
    k: TmaTensor | None  # modes (row, column, page)
    given: KernelArguments
    work: Work
    past: Past
    buffers: Buffers
    pipes: Pipes


@dataclass(frozen=True)
class Key:
    """Place of a key in a paged cache, and the first column of a box of it."""

    row: Int32
    page: Int32
    column: Int32 | int


@dataclass(frozen=True)
class Lane:
    """Position of a thread: the two rows of its accumulators."""

    team: int
    warp: Int32  # in the warpgroup
    row: Int32  # the other one is 8 further
    column: Int32  # first column, then every 8 columns
    real: tuple[Boolean, Boolean]  # whether the rows have a head and a token
    ends: tuple[Int32, Int32]  # keys of the first source before them are visible


@dataclass(frozen=True)
class Numbers:
    """Numbers of the entries of a tile, -1 for what is none: Int32 tensors in registers."""

    own: cute.Tensor  # (entry,), of this lane
    every: cute.Tensor  # (2,), of keys `lane` and `lane + 32`; in the warp that marks


@dataclass(frozen=True)
class Entries:
    """Entries of the cache that a gathering lane has of a tile: Uint32 tensors in registers."""

    places: cute.Tensor  # (entry,), begin of the data in units of 16 bytes, or NOWHERE
    scales: cute.Tensor  # (word, entry), see `entries.fetch_scales`
    found: cute.Tensor  # (2,), a bit for each key of the tile; in the warp that marks


@dataclass(frozen=True)
class Held:
    """What a gathering lane holds of half a tile: Uint32 tensors in registers."""

    half: cute.Tensor  # (word, chunk, entry)
    rest: cute.Tensor  # (word, chunk, entry), of the panel beside the halves


@dataclass(frozen=True)
class Target:
    """Where a lane stores its units, in this CTA, and in the one that it crosses with."""

    units: tuple[Int32, ...]  # addresses of a chunk's units in the first panel and turn
    peer: Int32  # distance to the same address in the other CTA's shared memory
    full: Int32  # mbarrier of the piece in the other CTA


@dataclass(frozen=True)
class Reference:
    """Reference of the weights of a thread's two rows: fp32 tensors (2,) in registers."""

    row_max: cute.Tensor  # in log2 units, may lag the maximum by LAG_LOG2
    row_sum: cute.Tensor  # of the weights of this thread's tiles
