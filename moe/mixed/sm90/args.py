"""On-chip memory and barriers of Hopper's kernel."""

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
    table: cute.Tensor | None = None  # int32, tokens of the rows of a tile
    scales: cute.Pointer | None = None  # fp32, of those rows, of each warpgroup
    mail: cute.Pointer | None = None  # fp32, sums of other CTAs, see `exchange`
    mail_barriers: cute.Pointer | None = None  # two of each warpgroup


@dataclass(frozen=True)
class Pipes:
    """The edges of the plan as barriers."""

    tile_load: Ring
    tile_math: Ring
    ab: Ring
    tile_gather: Ring | None = None
    x: Ring | None = None
