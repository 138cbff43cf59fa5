"""Bundles that travel between the kernel and its roles."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32

from kernelkit.boxes import TmaTensor
from kernelkit.pipelines import Ring
from moe.sm100.args import Numbers


@dataclass(frozen=True)
class Tensors:
    """weights: uint8 [E, bytes], as `weights.py` has them. factor: fp32 [E], of the products of an
    expert. offsets: int32 [E + 1]. out: [rows, columns]. bias: fp32 [E, rows of weights]."""

    weights: cute.Tensor
    factor: cute.Tensor
    offsets: cute.Tensor
    out: cute.Tensor
    bias: cute.Tensor | None = None


@dataclass(frozen=True)
class Sizes:
    """units: of K; tall: 64 rows of weights of an expert; experts; n_tiles of an expert."""

    units: Int32
    tall: Int32
    experts: Int32
    n_tiles: Int32


@dataclass(frozen=True)
class Buffers:
    """On-chip memory of the CTA."""

    tiles: cute.Tensor  # int32 [stage, word]
    x: cute.Pointer
    w: cute.Pointer
    out: cute.Pointer


@dataclass(frozen=True)
class Pipes:
    """The edges of the plan as barriers."""

    tile_load: Ring
    tile_math: Ring
    ab: Ring


@dataclass(frozen=True)
class Scope:
    """What every role of a CTA may reach."""

    x: TmaTensor
    tensors: Tensors
    numbers: Numbers
    sizes: Sizes
    buffers: Buffers
    pipes: Pipes
