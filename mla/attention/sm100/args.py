"""Bundles passed between the roles of the Blackwell kernel, with the shape of every field."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from kernelkit.device.boxes import TmaTensor
from kernelkit.device.pipelines import Event, Ring
from mla.attention.kernel_arguments import KernelArguments
from mla.attention.shared.work import Work


@dataclass(frozen=True)
class Pipes:
    """Edges of the plan."""

    k: Ring
    v: Ring
    q: Event
    s: Ring
    p: Event
    o: Event
    marks: Ring
    landed: Event | None = None
    cleared: Event | None = None


@dataclass(frozen=True)
class Buffers:
    """Shared memory: pointers of operands, addresses of words; and tensor memory."""

    q: cute.Pointer  # bf16 [panel][row]
    p: cute.Pointer  # bf16 [key // 64][row]
    k: cute.Pointer  # bf16 [panel][key]
    v: cute.Pointer  # bf16 [piece][panel][key]
    halves: cute.Pointer  # fp32 [turn][lane], see `rows.py`
    marks: Int32  # a bit for each key of a tile, 128 for each of two
    mail: Int32  # rows that others sent
    sent: Int32  # rows to send
    mail_full: Int32
    tmem: cute.Pointer


@dataclass(frozen=True)
class Scope:
    """What every role gets."""

    q: TmaTensor  # modes (head, column, token, entry)
    k: TmaTensor | None  # modes (row, column, page)
    last_v: TmaTensor | None  # the same, which tell the CTA itself that they have landed
    rows: TmaTensor | None  # modes (entry, column), of each source
    extra_rows: TmaTensor | None
    given: KernelArguments
    work: Work
    buffers: Buffers
    pipes: Pipes


@dataclass(frozen=True)
class Lane:
    """Half a query row of a thread of the softmax: a lane of tensor memory."""

    lane: Int32
    row: Int32  # of the CTA's tile
    half: Int32  # which half of the columns
    token: Int32
    head: Int32
    real: Boolean  # whether the row has a token and a head
    end: Int32  # keys of the first source before them are visible


@dataclass(frozen=True)
class Sums:
    """Reference of a row's weights, in log2 units, and their sum.

    sink: of the row's head, in log2 units.
    position: of the entry, at which O is rotated back.
    """

    top: Float32
    total: Float32
    sink: Float32
    position: Int64
