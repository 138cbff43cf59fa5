"""Example arguments that the host function is compiled for, and bundles passed on to the roles.

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
from moe.kernel_arguments import GroupedArguments, Moved, Numbers, Tensors


@dataclass(frozen=True)
class Operands:
    """Tensors that TMA reads. Modes of x and w: (row, byte of K, 1, expert). Modes of their scale
    factors: (atom along K, 16-bit word of the atom, block of 128 rows, expert)."""

    x: TmaTensor
    w: TmaTensor
    x_scales: TmaTensor
    w_scales: TmaTensor


@dataclass(frozen=True)
class Sizes:
    """Sizes of a product."""

    k: Int32  # elements of K
    experts: Int32
    n_tiles: Int32  # column tiles of an expert's matrix


@dataclass(frozen=True)
class Tile:
    """A tile of work, as the scheduler publishes it in the tile queue."""

    valid: Int32  # 0: there are no more tiles
    expert: Int32
    first: Int32  # its first row of x
    rows: Int32  # rows from `first` to the end of the expert: may exceed the tile
    block: Int32  # block of 128 rows of the scale factors of x
    quarter: Int32  # quarter of that block in which the tile begins
    n: Int32  # column tile of the expert's matrix


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
    pieces: cute.Pointer | None = None  # pieces of rows of the output, in bytes


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
    """Everything that the roles of a CTA use."""

    operands: Operands
    tensors: Tensors
    numbers: Numbers
    sizes: Sizes
    buffers: Buffers
    pipes: Pipes


OUT_TYPES = {"bf16": BFloat16, "fp16": Float16, "fp32": Float32}
ELEMENTS = {"e2m1": Float4E2M1FN, "e4m3": Float8E4M3FN}
SCALES = {"e4m3": Float8E4M3FN, "ue8m0": Float8E8M0FNU}


def example_arguments(config: GroupedConfig) -> tuple[GroupedArguments, CUstream]:
    """Return the arguments that `GroupedGemm.__call__` is compiled for."""
    # Sizes of 1 are also dynamic, as in the tensors of a launch.
    rows, experts, n, line, one = (cute.sym_int32() for _ in range(5))
    atoms, words = cute.sym_int32(), cute.sym_int32()
    moved = partial(fake_tensor, align=hw.TMA_ALIGN_BYTES)
    pairs, quantised = config.pair_scale, config.out_format is not None
    given = GroupedArguments(
        operands=Moved(
            x=moved(Uint8, one, rows, one, line),
            w=_windows(experts, n) if config.x_fmt else moved(Uint8, experts, n, one, line),
            x_scales=moved(Uint16, one, atoms, cute.sym_int32(), words),
            w_scales=moved(Uint16, experts, atoms, cute.sym_int32(), words),
        ),
        tensors=Tensors(
            offsets=_array(Int32),
            out=moved(OUT_TYPES.get(config.out, Uint8), rows, cute.sym_int32()),
            x_scale=_array(Float32, config.format.has_global),
            w_scale=fake_tensor(Float32, experts, 2)
            if pairs
            else _array(Float32, config.format.has_global),
            out_scales=_array(Uint8, quantised, align=4),
            encode_scale=_array(Float32, quantised and config.out_format.has_global),
            amax=_array(Float32, config.amax),
            bias=moved(Float32, experts, n) if config.bias else None,
        ),
        numbers=Numbers(alpha=Float32(1.0), beta=Float32(0.0), limit=Float32(0.0)),
        k=Int32(0),
        ctas=Int32(1),
    )
    return given, CUstream(0)


def _windows(experts: cute.SymInt, n: cute.SymInt) -> Any:
    """Return fake w: [experts, lines, windows, bytes of one]. Padded tensors are in units of 32
    bytes."""
    shape = experts, n, cute.sym_int32(), WINDOW // 2
    return fake_tensor(Uint8, *shape, align=WINDOW_ALIGN_BYTES)


def _array(dtype: type[cutlass.Numeric], wanted: bool = True, align: int | None = None) -> Any:
    """Return a fake vector; None if the config does not use it."""
    return fake_tensor(dtype, cute.sym_int32(), align=align) if wanted else None
