"""Bundles passed between the kernel and its roles.

Frozen dataclasses: the DSL flattens them into the same PTX as separate arguments.
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32

from gqa_lowlatency.shared.args import Place, Scalars, Tables, Tensors
from gqa_lowlatency.shared.mailbox import Mailbox
from gqa_lowlatency.shared.split import Share
from kernelkit.device.boxes import TmaTensor
from kernelkit.device.pipelines import Event, Ring


@dataclass(frozen=True)
class Buffers:
    """On-chip memory of the CTA: shared addresses, or pointers for MMA descriptors and TMA."""

    parts: Int32  # fp32 [parity][warp][column]
    bases: Int32  # fp32 [warp][base or acc_scale][column]
    row_scales: Int32  # fp32 [column], with e4m3: factors of the products of quantised rows
    q: cute.Pointer
    p: cute.Pointer
    ring: cute.Pointer
    tmem: cute.Pointer | None  # None before the CTA's first barrier


@dataclass(frozen=True)
class Pipes:
    """Edges of the plan as barriers; only `kv` before the others are initialised."""

    kv: Ring
    q: Event | None = None
    s: Event | None = None
    taken: Event | None = None
    p: Event | None = None
    o: Event | None = None


@dataclass(frozen=True)
class Scope:
    """Objects that every role of a CTA may use."""

    k: TmaTensor
    v: TmaTensor
    tensors: Tensors
    tables: Tables
    scalars: Scalars
    place: Place
    share: Share
    buffers: Buffers
    pipes: Pipes
    box: Mailbox


@dataclass(frozen=True)
class Fill:
    """Stage of the ring, and the parity of one filling of it, to wait for."""

    index: Int32
    phase: Int32
