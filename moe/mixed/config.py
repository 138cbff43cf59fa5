"""What a grouped GEMM is compiled for whose activations are numbers, and whose weights are not."""

from __future__ import annotations

from dataclasses import dataclass

from moe.formats import FORMATS, BlockFormat, format_of

TILE_ROWS = (8, 16, 32, 64, 128, 256)
TEAMS, PARTS, SPLITS = (1, 2, 3, 4, 5, 6), (1, 2), (1, 2, 4)
SPLIT_ROWS = 64  # of a tile that CTAs may share: sums of more would leave too little for the ring
TWICE = (3, 4)  # warpgroups that may take two times 64 rows each; others spill words
ROWS = 64  # of weights, that a warpgroup multiplies at a time
BITS = {"bf16": 16, "fp16": 16, "e4m3": 8}
WEIGHTS = ("nvfp4", "mxfp4")
NUMBERS = ("bf16", "fp16")  # of outputs that have no scale
OUTPUTS = (*NUMBERS, "e4m3")
ACTIVATIONS = {"bf16": WEIGHTS, "e4m3": ("mxfp4",)}  # and the weights that they go with
ROW_THREADS, ROW_VECTOR = 128, 16  # of the kernel that rounds rows: elements that a thread takes
# Of a thread by warpgroups that compute: of theirs, and of those who load.
REGISTERS = {
    1: (240, 64), 2: (224, 56), 3: (152, 56), 4: (104, 64), 5: (80, 80), 6: (72, 72),
}  # fmt: skip
OTHERS = 28  # beside sums and weights; with fewer ptxas lets no two wgmmas overlap (C7512)
UNIT_WORDS = 32  # of a thread, for weights in bf16 of two units of K


@dataclass(frozen=True)
class MixedConfig:
    """One compiled kernel: rows of numbers, sorted by expert, times the matrix of their expert.

    fmt: of the weights. x: dtype of the rows; row_scale: in e4m3 each has a scale of its own.
    swiglu: pairs of columns become one; limit: which are clamped before it.
    bias: is added to the products. out: dtype of the output.
    tile_rows: rows of an expert in a tile, the N of the MMA.
    gather: rows of x are where the tokens are, and are fetched from there.
    teams: warpgroups that compute; parts: times 64 rows of weights that each of them multiplies.
    split: CTAs of a cluster that share a tile: each multiplies its part of K.
    pdl: programmatic dependent launch.
    """

    fmt: str = "mxfp4"
    x: str = "bf16"
    row_scale: bool = False
    swiglu: bool = False
    limit: bool = False
    bias: bool = False
    out: str = "bf16"
    gather: bool = False
    tile_rows: int = 64
    teams: int = 2
    parts: int = 1
    split: int = 1
    pdl: bool = False

    @property
    def format(self) -> BlockFormat:
        """Of the weights."""
        return FORMATS[self.fmt]

    @property
    def x_bits(self) -> int:
        """Of an element of the rows, and of the weights as they are multiplied."""
        return BITS[self.x]

    @property
    def step(self) -> int:
        """K of an MMA."""
        return 256 // self.x_bits

    @property
    def ctas(self) -> int:
        """That share a tile."""
        return self.split

    @property
    def tile_n(self) -> int:
        """Columns of the product in a tile, which are rows of the weights."""
        return ROWS * self.teams * self.parts

    def registers(self, widths: int) -> int:
        """Of a thread that computes, where products have so many widths: weights of each are in
        registers of their own."""
        weights = UNIT_WORDS * self.x_bits // 16 * self.parts * widths
        return self.tile_rows * self.parts // 2 + weights + OTHERS

    @property
    def tile_outputs(self) -> int:
        """Columns of the output that a tile gives."""
        return self.tile_n // (2 if self.swiglu else 1)

    def check_values(self) -> None:
        """Raise ValueError or NotImplementedError, naming the value and what is possible."""
        format_of(self.fmt)
        named = {
            "x": (self.x, tuple(ACTIVATIONS)), "out": (self.out, OUTPUTS),
            "fmt": (self.fmt, ACTIVATIONS.get(self.x, WEIGHTS)),
            "tile_rows": (self.tile_rows, TILE_ROWS), "teams": (self.teams, TEAMS),
            "parts": (self.parts, PARTS), "split": (self.split, SPLITS),
        }  # fmt: skip
        for name, (value, possible) in named.items():
            if value not in possible:
                raise NotImplementedError(f"{name} {value!r}: one of {possible}")
        if self.parts > 1 and self.teams not in TWICE:
            raise NotImplementedError(
                f"parts {self.parts} with {self.teams} warpgroups: 1, or 2 with one of {TWICE}"
            )
        if self.split > 1 and self.tile_rows > SPLIT_ROWS:
            raise NotImplementedError(
                f"split {self.split} with tile_rows {self.tile_rows}: 1 beyond {SPLIT_ROWS} rows"
            )
        if self.limit and not self.swiglu:
            raise ValueError("limit without an activation: nothing is clamped")
        least, most = self.registers(1), REGISTERS[self.teams][0]
        if least > most:
            raise ValueError(
                f"tile_rows {self.tile_rows} with {self.teams} warpgroups of {self.parts} x {ROWS} "
                f"rows of weights in {self.x}: {least} registers of a thread, limit {most}"
            )


def fits(tile_rows: int, teams: int, parts: int) -> bool:
    """Whether there are such tiles of rows in bf16."""
    config = MixedConfig(tile_rows=tile_rows, teams=teams, parts=parts)
    few = parts == 1 or teams in TWICE
    return few and config.registers(1) <= REGISTERS[teams][0]


@dataclass(frozen=True)
class RowsConfig:
    """The kernel that rounds rows of bf16 to e4m3, of which there is one."""
