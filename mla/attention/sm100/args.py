"""Bundles passed between the roles of the Blackwell kernel, with the shape of every field."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from kernelkit.device.boxes import TmaTensor
from kernelkit.device.pipelines import Event, Ring
from mla.attention.kernel_arguments import KernelArguments


@dataclass(frozen=True)
class Work:
    """Query rows and keys of a pair, and the CTA's half of them.

    Tiles of keys are numbered over the sources, those of `extra` after those of `keys`.
    """

    entry: Int32
    tile: Int32  # of the entry's rows
    token: Int32  # first token of the tile
    head: Int32  # first head of the tile
    keys: Int32  # keys of the first source that any row of the entry sees
    extra: Int32  # keys of the second source
    own_tiles: Int32  # tiles of the first source that a row of this tile sees
    begin: Int32  # first tile of this pair
    count: Int32  # its tiles
    active: Int32  # pairs of all clusters that have tiles
    part: Int32  # cluster
    rank: Int32  # of the pair in its cluster
    half: Int32  # of the CTA in its pair: which keys of a tile, and which columns of O


@dataclass(frozen=True)
class Pipes:
    """Edges of the plan."""

    key: Ring
    own: Ring
    peer: Ring
    q: Event
    lent: Event
    s: Ring
    p: Event
    o: Event


@dataclass(frozen=True)
class Buffers:
    """Shared memory: pointers of operands, addresses of words; and tensor memory."""

    q: cute.Pointer  # bf16 [panel][row]
    p: cute.Pointer  # bf16 [own keys, the peer's]
    own: cute.Pointer  # bf16 [tile][panel]
    peer: cute.Pointer  # bf16 [piece][panel]
    key: cute.Pointer  # bf16 [stage], two panels each
    exchanged: Int32  # mbarriers, see `exchange.py`
    maxima: Int32  # fp32 [2][row], of the peer
    valid: Int32  # a bit for each own key of a tile, 64 for each of two
    mail: Int32  # rows that others sent
    sent: Int32  # rows to send
    mail_full: Int32
    tmem: cute.Pointer


@dataclass(frozen=True)
class Scope:
    """What every role gets."""

    q: TmaTensor  # modes (head, column, token, entry)
    k: TmaTensor | None  # modes (row, column, page)
    pieces: TmaTensor | None  # the same in smaller boxes
    given: KernelArguments
    work: Work
    buffers: Buffers
    pipes: Pipes


@dataclass(frozen=True)
class Lane:
    """Query row of a thread of the softmax: a lane of tensor memory."""

    row: Int32
    token: Int32
    head: Int32
    real: Boolean  # whether the row has a token and a head
    end: Int32  # keys of the first source before it are visible


@dataclass(frozen=True)
class Sums:
    """Reference of a row's weights, in log2 units, and their sum."""

    top: Float32
    total: Float32
