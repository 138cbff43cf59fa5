"""What a grouped GEMM is compiled for."""

from __future__ import annotations

from dataclasses import dataclass

from moe.formats import FORMATS, BlockFormat

GRANULARITIES = (8, 16, 32, 64)
OUT_DTYPES = ("bf16", "fp16", "fp32")
TILE_N = (64, 128)
LEAST_SUBTILE = 32  # columns of fp32 that a thread has in registers at a time


@dataclass(frozen=True)
class GroupedConfig:
    """One compiled kernel: rows sorted by expert times the matrix of their expert.

    fmt: of both operands, a name of moe.formats.FORMATS.
    row_scale: the rows of A have a global scale each instead of one for all.
    granularity: rows of gate, then of up, that alternate in the packed weights; 0: no activation,
        the plain product. limit: gate and up are clamped before it.
    out: dtype of the output, or a format that it is quantised to. amax: the largest magnitude of
        the output is found, too.
    tile_n: packed columns of a tile.
    """

    fmt: str = "nvfp4"
    row_scale: bool = False
    granularity: int = 32
    limit: bool = False
    out: str = "bf16"
    amax: bool = False
    tile_n: int = 128

    @property
    def format(self) -> BlockFormat:
        """Of both operands."""
        return FORMATS[self.fmt]

    @property
    def out_format(self) -> BlockFormat | None:
        """Of the output, None where it is not quantised."""
        return FORMATS.get(self.out)

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
    def tile_outputs(self) -> int:
        """Columns of the output that a tile gives."""
        return self.tile_n // self.inputs_of_output

    def check_values(self) -> None:
        """Raise NotImplementedError or ValueError, naming the value and what is possible."""
        _one_of("fmt", self.fmt, tuple(FORMATS))
        _one_of("granularity", self.granularity, (0, *GRANULARITIES))
        _one_of("out", self.out, (*OUT_DTYPES, *FORMATS))
        _one_of("tile_n", self.tile_n, TILE_N)
        if self.limit and not self.swiglu:
            raise ValueError("limit without an activation: nothing is clamped")
        if self.row_scale and not self.format.has_global:
            raise ValueError(f"row_scale with {self.fmt}, which has no global scale")
        if self.tile_n % self.subtile:
            raise ValueError(
                f"granularity {self.granularity} and {self.out} take {self.subtile} columns at a "
                f"time, tile_n is {self.tile_n}"
            )


def _one_of(name: str, value: object, supported: tuple) -> None:
    if value not in supported:
        raise NotImplementedError(f"{name} {value!r}: supported are {supported}")
