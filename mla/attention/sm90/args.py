"""Bundles passed between the roles of the Hopper kernel, with the shape of every field."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Boolean, Int32

from kernelkit.device.boxes import TmaTensor
from kernelkit.device.pipelines import Event, Ring
from mla.attention.kernel_arguments import KernelArguments
from mla.attention.shared.work import Work


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

    q: cute.Pointer  # bf16, which become fp16 in place if tiles are fp16
    k: cute.Pointer  # bf16 or fp16, both buffers
    q_full: cute.Pointer  # mbarrier
    rows: cute.Pointer  # fp32: maxima, then sums of even units, of odd units, each (row, team)
    factors: Int32  # fp32 (row,): what rows of Q in fp16 were divided by
    units: Int32  # fp32 (buffer, key, 2): what a key was divided by, and its log2
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
class Lane:
    """Position of a thread: the two rows of its accumulators."""

    team: int
    warp: Int32  # in the warpgroup
    row: Int32  # the other one is 8 further
    column: Int32  # first column, then every 8 columns
    real: tuple[Boolean, Boolean]  # whether the rows have a head and a token
    ends: tuple[Int32, Int32]  # keys of the first source before them are visible


@dataclass(frozen=True)
class Reference:
    """Reference of the weights of a thread's two rows: fp32 tensors (2,) in registers."""

    row_max: cute.Tensor  # in log2 units, may lag the maximum by LAG_LOG2
    row_sum: cute.Tensor  # of the weights of this thread's tiles
