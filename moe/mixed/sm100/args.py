"""On-chip memory and barriers of Blackwell's kernel."""

from dataclasses import dataclass

import cutlass.cute as cute

from kernelkit.device.pipelines import Ring


@dataclass(frozen=True)
class Buffers:
    """On-chip memory of the CTA."""

    tiles: cute.Tensor  # int32 [stage, word]
    x: cute.Pointer
    w: cute.Pointer
    out: cute.Pointer
    tmem: cute.Pointer


@dataclass(frozen=True)
class Pipes:
    """The edges of the plan as barriers."""

    tile_load: Ring
    tile_math: Ring
    tile_mma: Ring
    tile_epilogue: Ring
    w: Ring
    x: Ring
    a: Ring
    acc: Ring
    tile_gather: Ring | None = None
