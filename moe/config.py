"""What a grouped GEMM is compiled for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moe.formats import FORMATS, BlockFormat

GRANULARITIES = (8, 16, 32, 64)
DEFAULT_GRANULARITY = 32
OUT_BITS = {"bf16": 16, "fp16": 16, "fp32": 32}
MIXED = ("mxfp8", "mxfp4")  # formats of x and of w that may differ
# Of e2m1 beside e4m3 TMA pads 16 elements to 16 bytes (CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN16B):
# those of whole windows alone, which begin at multiples of 32 bytes. There is one at every
# WINDOW_STEP elements, so that the last one can end with K, which need not be a multiple of WINDOW.
WINDOW, WINDOW_STEP = 128, 64
WINDOW_ALIGN_BYTES = WINDOW_STEP // 2
KERNELS = {"sm_100a": "moe.sm100.kernel"}
SWAPPED_ROWS = (8, 16, 32, 64)  # of a tile of few rows: they are the N of the MMA
TILE_ROWS = (*SWAPPED_ROWS, 128, 256)
TILE_N = (128, 256)
PART = 128  # columns of the product that the epilogue has codes of in registers at a time
CARRIED = 8  # columns of gate, then of up, of the path that carries
LEAST_SUBTILE = 32  # columns of fp32 that a thread has in registers at a time


@dataclass(frozen=True)
class GroupedConfig:
    """One compiled kernel: rows sorted by expert times the matrix of their expert.

    fmt: of the weights, a name of moe.formats.FORMATS. x_fmt: that of the rows, '' for the same.
    row_scale: the rows of A have a global scale each instead of one for all.
    pair_scale: gate and up of an expert have a global scale each instead of one for both.
    granularity: rows of gate, then of up, that alternate in the packed weights; 0: no activation,
        the plain product. limit: gate and up are clamped before it.
    out: dtype of the output, or a format that it is quantised to. amax: the largest magnitude of
        the output is found, too.
    bias: each column of an expert's product has a number added to it, before the activation.
    carry: the epilogue takes 8 columns at a time, and carries what became of gate to the next 8.
    tile_rows: rows of an expert in a tile. 128 are the M of the MMA; 256 that of a pair of CTAs,
        each with half of the columns in shared memory; up to 64 are its N, the weights its M.
    tile_n: packed columns of a tile.
    pdl: programmatic dependent launch: it may begin before the kernel in front of it has ended, and
        lets the one behind it do so.
    w_ready: with pdl: offsets, weights and biases are older than the kernel in front, and are
        fetched before it has ended.
    """

    label: ClassVar = ("moe_grouped_gemm", "fmt")

    fmt: str = "nvfp4"
    row_scale: bool = False
    granularity: int = 32
    limit: bool = False
    out: str = "bf16"
    amax: bool = False
    bias: bool = False
    x_fmt: str = ""
    carry: bool = False
    tile_rows: int = 128
    tile_n: int = 128
    pdl: bool = False
    w_ready: bool = False
    pair_scale: bool = False

    @property
    def swapped(self) -> bool:
        """Whether weights are the rows of the MMA, and tokens its columns."""
        return self.tile_rows in SWAPPED_ROWS

    @property
    def ctas(self) -> int:
        """That share a tile."""
        return 2 if self.tile_rows == 256 else 1

    @property
    def format(self) -> BlockFormat:
        """Of the weights."""
        return FORMATS[self.fmt]

    @property
    def x_format(self) -> BlockFormat:
        """Of the rows."""
        return FORMATS[self.x_fmt or self.fmt]

    @property
    def out_format(self) -> BlockFormat | None:
        """Of the output, None where it is not quantised."""
        return FORMATS.get(self.out)

    @property
    def output_bits(self) -> int:
        """Of one of its elements."""
        form = self.out_format
        return 8 // form.per_byte if form else OUT_BITS[self.out]

    @property
    def swiglu(self) -> bool:
        """Whether pairs of columns become one."""
        return self.granularity > 0

    @property
    def inputs_of_output(self) -> int:
        """Columns of the product that one of the output comes from."""
        return 2 if self.swiglu else 1

    @property
    def subtile(self) -> int:
        """Columns that the epilogue takes at a time: whole pairs, and whole blocks of the output,
        so that nothing is carried from one to the next."""
        block = self.out_format.block * self.inputs_of_output if self.out_format else 0
        return max(LEAST_SUBTILE, 2 * self.granularity, block)

    @property
    def subtile_outputs(self) -> int:
        """Columns of the output that a subtile gives."""
        return self.subtile // self.inputs_of_output

    @property
    def tile_outputs(self) -> int:
        """Columns of the output that a tile gives."""
        return self.tile_n // self.inputs_of_output

    def check_values(self) -> None:
        """Raise NotImplementedError or ValueError, naming the value and what is possible."""
        _one_of("fmt", self.fmt, tuple(FORMATS))
        _one_of("granularity", self.granularity, (0, *GRANULARITIES))
        _one_of("out", self.out, (*OUT_BITS, *FORMATS))
        _one_of("tile_rows", self.tile_rows, TILE_ROWS)
        _one_of("tile_n", self.tile_n, TILE_N)
        if self.x_fmt and (self.x_fmt, self.fmt) != MIXED:
            raise NotImplementedError(
                f"x_fmt {self.x_fmt!r} with fmt {self.fmt!r}: '' for one format, or {MIXED}"
            )
        if self.w_ready and not self.pdl:
            raise ValueError("w_ready without pdl: nothing is waited for")
        if self.limit and not self.swiglu:
            raise ValueError("limit without an activation: nothing is clamped")
        if self.row_scale and not self.format.has_global:
            raise ValueError(f"row_scale with {self.fmt}, which has no global scale")
        if self.pair_scale and not (self.format.has_global and self.swiglu):
            raise ValueError(
                f"pair_scale with {self.fmt} and granularity {self.granularity}: a format with "
                "global scales, and gate and up in turn"
            )
        if self.swapped and self.tile_n != PART:
            raise ValueError(f"tile_n {self.tile_n} with tile_rows {self.tile_rows}: {PART}")
        if self.carry and (self.granularity != CARRIED or self.swapped):
            raise NotImplementedError(
                f"carry with granularity {self.granularity} and tile_rows {self.tile_rows}: "
                f"granularity {CARRIED}, tile_rows {TILE_ROWS[-2:]}"
            )


def _one_of(name: str, value: object, supported: tuple) -> None:
    if value not in supported:
        raise NotImplementedError(f"{name} {value!r}: supported are {supported}")
