"""Config that a grouped GEMM is compiled for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moe.formats import FORMATS, BlockFormat

GRANULARITIES = (8, 16, 32, 64)
DEFAULT_GRANULARITY = 32
OUT_BITS = {"bf16": 16, "fp16": 16, "fp32": 32}
MIXED = ("mxfp8", "mxfp4")  # formats of x and of w that may differ
# For e2m1 with e4m3, TMA pads 16 elements to 16 bytes (CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN16B). It
# loads whole windows only, which begin at multiples of 32 bytes. A window begins at every
# WINDOW_STEP elements, so the last one can end with K, which need not be a multiple of WINDOW.
WINDOW, WINDOW_STEP = 128, 64
WINDOW_ALIGN_BYTES = WINDOW_STEP // 2
KERNELS = {"sm_100a": "moe.sm100.kernel"}
SWAPPED_ROWS = (8, 16, 32, 64)  # tiles of few rows, which are the N of the MMA
TILE_ROWS = (*SWAPPED_ROWS, 128, 256)
TILE_N = (128, 256)
PART = 128  # columns of the product whose codes the epilogue has in registers at a time
CARRIED = 8  # columns of gate, then of up, with `carry`
LEAST_SUBTILE = 32  # columns of fp32 that a thread has in registers at a time


@dataclass(frozen=True)
class GroupedConfig:
    """A compiled kernel: rows sorted by expert times the matrix of their expert.

    Values of tile_rows: 128 rows are the M of the MMA. 256 rows are the M of a pair of CTAs, each
    with half of the columns in shared memory. Up to 64 rows are its N, and the weights its M.
    """

    label: ClassVar = ("moe_grouped_gemm", "fmt")

    fmt: str = "nvfp4"  # of the weights: a name of moe.formats.FORMATS
    row_scale: bool = False  # each row of A has a global scale, instead of one for all
    granularity: int = 32  # alternating rows of gate, then up, in packed weights; 0: no activation
    limit: bool = False  # gate and up are clamped before the activation
    out: str = "bf16"  # dtype of the output, or a format that it is quantised to
    amax: bool = False  # the largest magnitude of the output is computed, too
    bias: bool = False  # fp32 is added to each column of an expert before the activation
    x_fmt: str = ""  # format of the rows; '': that of the weights
    carry: bool = False  # the epilogue processes 8 columns at a time, gate then up
    tile_rows: int = 128  # rows of an expert in a tile
    tile_n: int = 128  # packed columns of a tile
    pdl: bool = False  # programmatic dependent launch, on the previous and for the next kernel
    # with pdl: offsets, weights and biases are older than the previous kernel; read before it ends
    w_ready: bool = False
    pair_scale: bool = False  # gate and up of an expert have separate global scales

    @property
    def swapped(self) -> bool:
        """Whether weights are the rows of the MMA, and tokens its columns."""
        return self.tile_rows in SWAPPED_ROWS

    @property
    def ctas(self) -> int:
        """Number of CTAs that share a tile."""
        return 2 if self.tile_rows == 256 else 1

    @property
    def format(self) -> BlockFormat:
        """Format of the weights."""
        return FORMATS[self.fmt]

    @property
    def x_format(self) -> BlockFormat:
        """Format of the rows."""
        return FORMATS[self.x_fmt or self.fmt]

    @property
    def out_format(self) -> BlockFormat | None:
        """Format of the output; None if it is not quantised."""
        return FORMATS.get(self.out)

    @property
    def output_bits(self) -> int:
        """Bits of an element of the output."""
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
        """Columns that the epilogue processes at a time: whole pairs and whole blocks of the
        output, so that no state is carried to the next."""
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
                f"x_fmt {self.x_fmt!r} with fmt {self.fmt!r}: '' for the format of w, or {MIXED}"
            )
        if self.w_ready and not self.pdl:
            raise ValueError("w_ready without pdl: there is no earlier kernel to wait for")
        if self.limit and not self.swiglu:
            raise ValueError("limit without an activation: nothing is clamped")
        if self.row_scale and not self.format.has_global:
            raise ValueError(f"row_scale with {self.fmt}, which has no global scale")
        if self.pair_scale and not (self.format.has_global and self.swiglu):
            raise ValueError(
                f"pair_scale with {self.fmt} and granularity {self.granularity}: needs a format "
                "with global scales, and alternating gate and up"
            )
        if self.swapped and self.tile_n != PART:
            raise ValueError(f"tile_n {self.tile_n} with tile_rows {self.tile_rows}: {PART}")
        if self.carry and (self.granularity != CARRIED or self.swapped):
            raise NotImplementedError(
                f"carry with granularity {self.granularity} and tile_rows {self.tile_rows}: "
                f"needs granularity {CARRIED}, tile_rows one of {TILE_ROWS[-2:]}"
            )


def _one_of(name: str, value: object, supported: tuple) -> None:
    if value not in supported:
        raise NotImplementedError(f"{name} {value!r}: supported are {supported}")
