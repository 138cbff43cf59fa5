"""Bundles that travel between a kernel and its roles."""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from kernelkit.device.boxes import TmaTensor
from moe.sm100.args import Numbers


@dataclass(frozen=True)
class Tensors:
    """weights: uint8 [E, bytes], as `fragments.py` has them. factor: fp32, of the products of an
    expert [E], of its gate and of its up, [E, 2], or of each of its rows of weights, [E, rows].
    offsets: int32 [E + 1]. out: [rows, columns]. bias: fp32 [E, rows of weights]. rows: int32
    [rows], the slot that each row is of, where x is gathered. x_scale: fp32, of all rows of x or of
    each; out_scale: fp32 [1], what outputs are multiplied by before they are rounded to e4m3."""

    weights: cute.Tensor
    factor: cute.Tensor
    offsets: cute.Tensor
    out: cute.Tensor
    bias: cute.Tensor | None = None
    rows: cute.Tensor | None = None
    x_scale: cute.Tensor | None = None
    out_scale: cute.Tensor | None = None


@dataclass(frozen=True)
class Sizes:
    """units: of K; tall: times 64 rows of weights of an expert; experts; n_tiles of an expert;
    slots: of a token."""

    units: Int32
    tall: Int32
    experts: Int32
    n_tiles: Int32
    slots: Int32


@dataclass(frozen=True)
class Share:
    """Of K, that a CTA multiplies. rank: of the CTA among those that share a tile; first, units: of
    its units of K."""

    rank: Int32
    first: Int32
    units: Int32


@dataclass(frozen=True)
class Scope:
    """What every role of a CTA may reach."""

    x: TmaTensor | cute.Tensor  # [tokens, K] where it is gathered
    tensors: Tensors
    numbers: Numbers
    sizes: Sizes
    share: Share
    buffers: Any  # `Buffers` and `Pipes` of the architecture
    pipes: Any
