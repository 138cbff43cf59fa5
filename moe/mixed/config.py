"""What a grouped GEMM is compiled for whose activations are numbers, and whose weights are not."""

from __future__ import annotations

from dataclasses import dataclass

from moe.formats import FORMATS, BlockFormat, format_of

TILE_ROWS = (8, 16, 32, 64, 128, 256)
TEAMS, PARTS = (1, 2, 3, 4, 5, 6), (1, 2)
ROWS = 64  # of weights, that a warpgroup multiplies at a time
BITS = {"bf16": 16, "fp16": 16, "e4m3": 8}
WEIGHTS = ("nvfp4", "mxfp4")
OUTPUTS = ("bf16", "fp16", "e4m3")
ACTIVATIONS = {"bf16": WEIGHTS, "e4m3": ("mxfp4",)}  # and the weights that they go with
ROW_THREADS, ROW_VECTOR = 128, 16  # of the kernel that rounds rows: elements that a thread takes
# warpgroups -> columns of 64 rows of sums that registers hold
MOST_SUMS = {1: 256, 2: 256, 3: 128, 4: 64, 5: 32, 6: 32}


@dataclass(frozen=True)
class MixedConfig:
    """One compiled kernel: rows of numbers, sorted by expert, times the matrix of their expert.

    fmt: of the weights. x: dtype of the rows; row_scale: in e4m3 each has a scale of its own.
    swiglu: pairs of columns become one; limit: which are clamped before it.
    bias: is added to the products. out: dtype of the output.
    tile_rows: rows of an expert in a tile, the N of the MMA.
    gather: rows of x are where the tokens are, and are fetched from there.
    teams: warpgroups that compute; parts: times 64 rows of weights that each of them multiplies.
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
        return 1

    @property
    def tile_n(self) -> int:
        """Columns of the product in a tile, which are rows of the weights."""
        return ROWS * self.teams * self.parts

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
            "parts": (self.parts, PARTS),
        }  # fmt: skip
        for name, (value, possible) in named.items():
            if value not in possible:
                raise NotImplementedError(f"{name} {value!r}: one of {possible}")
        if self.limit and not self.swiglu:
            raise ValueError("limit without an activation: nothing is clamped")
        most = MOST_SUMS[self.teams] // self.parts
        if self.tile_rows > most:
            raise ValueError(
                f"tile_rows {self.tile_rows} with {self.teams} warpgroups of {self.parts} x {ROWS} "
                f"rows of weights: at most {most}, which registers hold"
            )


@dataclass(frozen=True)
class RowsConfig:
    """The kernel that rounds rows of bf16 to e4m3, of which there is one."""
