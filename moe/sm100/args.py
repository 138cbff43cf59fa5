"""Bundles that travel between the kernel and its roles.

Frozen dataclasses: the DSL flattens them into the same PTX as separate arguments.
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32

from kernelkit.device.boxes import TmaTensor
from kernelkit.device.pipelines import Ring


@dataclass(frozen=True)
class Operands:
    """What TMA reads. Modes of x and w: (row, byte of K, 1, expert), of their scale factors: (atom
    along K, 16-bit word of it, block of 128 rows, expert)."""

    x: TmaTensor
    w: TmaTensor
    x_scales: TmaTensor
    w_scales: TmaTensor


@dataclass(frozen=True)
class Tensors:
    """offsets: int32 [E + 1]. out: [rows, columns], in bytes where it is quantised.

    x_scale, w_scale: fp32 [1] or [rows], and [E] or [E, 2] of gate and of up, what decodes x and w,
    in a format with global scales. out_scales, encode_scale: scale factors of a quantised output,
    1-D, and fp32 [1]. amax: fp32 [1], the largest magnitude of the output, where it is asked for.
    bias: fp32 [E, N], in the order of the rows of w.
    """

    offsets: cute.Tensor
    out: cute.Tensor
    x_scale: cute.Tensor | None = None
    w_scale: cute.Tensor | None = None
    out_scales: cute.Tensor | None = None
    encode_scale: cute.Tensor | None = None
    amax: cute.Tensor | None = None
    bias: cute.Tensor | None = None


@dataclass(frozen=True)
class Numbers:
    """h = (up + beta) gate sigmoid(alpha gate), both clamped by limit before."""

    alpha: Float32
    beta: Float32
    limit: Float32


@dataclass(frozen=True)
class Sizes:
    """k: elements of K, experts, n_tiles of an expert's matrix."""

    k: Int32
    experts: Int32
    n_tiles: Int32


@dataclass(frozen=True)
class Tile:
    """A piece of work. first: its first row of x; rows: how many of the tile are the expert's, or
    more; block: of 128 rows of the scale factors of x, quarter: of that block, where it begins; n:
    of the tiles of the expert's matrix."""

    valid: Int32
    expert: Int32
    first: Int32
    rows: Int32
    block: Int32
    quarter: Int32
    n: Int32


@dataclass(frozen=True)
class Buffers:
    """On-chip memory of the CTA."""

    tiles: cute.Tensor  # int32 [stage, word]
    x: cute.Pointer
    w: cute.Pointer
    x_scales: cute.Pointer
    w_scales: cute.Pointer
    tmem: cute.Pointer
    transposed: cute.Tensor | None = None  # fp32 [column of the accumulator, its row]
    pieces: cute.Pointer | None = None  # of rows of the output, in bytes


@dataclass(frozen=True)
class Pipes:
    """The edges of the plan as barriers."""

    tile_load: Ring
    tile_mma: Ring
    tile_epilogue: Ring
    ab: Ring
    acc: Ring


@dataclass(frozen=True)
class Scope:
    """What every role of a CTA may reach."""

    operands: Operands
    tensors: Tensors
    numbers: Numbers
    sizes: Sizes
    buffers: Buffers
    pipes: Pipes
