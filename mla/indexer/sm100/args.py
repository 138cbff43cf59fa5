"""Bundles that travel between the kernel and its roles, and boxes that TMA moves (device code)."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32, Uint8

from kernelkit.device.boxes import Box, TmaTensor
from kernelkit.device.pipelines import Event, Ring
from mla.indexer.params import ScoresParams
from mla.indexer.sm100.plan import ROW_BYTES, ScoresPlan


@dataclass(frozen=True)
class Operands:
    """What TMA reads, modes (row or head, byte, 1, slot or token)."""

    keys: TmaTensor
    q: TmaTensor


@dataclass(frozen=True)
class Buffers:
    """On-chip memory of the CTA."""

    spans: cute.Tensor  # int32 (tokens + 1, 2)
    weights: cute.Tensor  # fp32 (columns of a product)
    q_scales: cute.Pointer  # words
    key_scales: cute.Pointer  # words
    q: cute.Pointer
    keys: cute.Pointer
    tmem: cute.Pointer


@dataclass(frozen=True)
class Pipes:
    """The edges of the plan as barriers."""

    q: Event
    keys: Ring
    scales: Ring
    acc: Ring


@dataclass(frozen=True)
class Share:
    """Of the work: the first token of the CTA; tiles cta, cta + ctas, ... of keys."""

    first: Int32
    cta: Int32
    ctas: Int32


@dataclass(frozen=True)
class Scope:
    """What every role of a CTA may reach."""

    operands: Operands
    params: ScoresParams
    buffers: Buffers
    pipes: Pipes
    share: Share


def key_box(plan: ScoresPlan) -> Box:
    """Keys of a page, in bytes."""
    return Box(plan.config.box, ROW_BYTES, Uint8)


def query_box(plan: ScoresPlan) -> Box:
    """A token, in bytes."""
    return Box(plan.config.heads, ROW_BYTES, Uint8)
