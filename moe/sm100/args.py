"""What the host function takes, as fake tensors, and bundles that travel from it to the roles.

The bundles are frozen dataclasses: the DSL flattens them into the same PTX as separate arguments.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import (
    BFloat16,
    Float4E2M1FN,
    Float8E4M3FN,
    Float8E8M0FNU,
    Float16,
    Float32,
    Int32,
    Uint8,
    Uint16,
)

from kernelkit.device.boxes import TmaTensor
from kernelkit.device.fake import fake_tensor
from kernelkit.device.pipelines import Ring
from kernelkit.plan import hw
from moe.config import WINDOW, WINDOW_ALIGN_BYTES, GroupedConfig


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


OUT_TYPES = {"bf16": BFloat16, "fp16": Float16, "fp32": Float32}
ELEMENTS = {"e2m1": Float4E2M1FN, "e4m3": Float8E4M3FN}
SCALES = {"e4m3": Float8E4M3FN, "ue8m0": Float8E8M0FNU}


def example_arguments(config: GroupedConfig) -> tuple:
    """(operands, tensors, numbers, k, stream), as `GroupedGemm.__call__` takes them."""
    # Sizes of 1 are dynamic, too: that is how a tensor is described at a launch.
    rows, experts, n, line, one = (cute.sym_int32() for _ in range(5))
    atoms, words = cute.sym_int32(), cute.sym_int32()
    moved = partial(fake_tensor, align=hw.TMA_ALIGN_BYTES)
    # What TMA moves: [experts, lines, blocks or 1, bytes or words].
    operands = (
        moved(Uint8, one, rows, one, line),
        _windows(experts, n) if config.x_fmt else moved(Uint8, experts, n, one, line),
        moved(Uint16, one, atoms, cute.sym_int32(), words),
        moved(Uint16, experts, atoms, cute.sym_int32(), words),
    )
    tensors = (
        _array(Int32),
        moved(OUT_TYPES.get(config.out, Uint8), rows, cute.sym_int32()),
        _array(Float32, config.format.has_global),
        fake_tensor(Float32, experts, 2)
        if config.pair_scale
        else _array(Float32, config.format.has_global),
        _array(Uint8, config.out_format is not None, align=4),
        _array(Float32, config.out_format is not None and config.out_format.has_global),
        _array(Float32, config.amax),
        moved(Float32, experts, n) if config.bias else None,
    )
    numbers = (Float32(1.0), Float32(0.0), Float32(0.0))
    return operands, tensors, numbers, Int32(0), Int32(1), CUstream(0)


def _windows(experts: cute.SymInt, n: cute.SymInt) -> Any:
    """[experts, lines, windows, bytes of one]; what is padded is in units of 32 bytes."""
    shape = experts, n, cute.sym_int32(), WINDOW // 2
    return fake_tensor(Uint8, *shape, align=WINDOW_ALIGN_BYTES)


def _array(dtype: type[cutlass.Numeric], wanted: bool = True, align: int | None = None) -> Any:
    """A vector, None where the config has no use for it."""
    return fake_tensor(dtype, cute.sym_int32(), align=align) if wanted else None
