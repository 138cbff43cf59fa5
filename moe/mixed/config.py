"""Config of a grouped GEMM with unquantised or row-scaled activations and block-scaled weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kernelkit.plan import hw
from moe.formats import FORMATS, BlockFormat, format_of

KERNELS = {"sm_100a": "moe.mixed.sm100.kernel", "sm_90a": "moe.mixed.sm90.kernel"}
ARCHS = tuple(KERNELS)
TILE_ROWS = (8, 16, 32, 64, 96, 128, 160, 192, 256)
ROWS_OF = {"sm_90a": TILE_ROWS, "sm_100a": (16, 32, 64, 128, 256)}
TEAMS, PARTS, SPLITS = (1, 2, 3, 4, 5, 6), (1, 2), (1, 2, 4)
SPLIT_ARCH = "sm_90a"
SPLIT_ROWS = 64  # most rows of a shared tile: more sums would leave too little for the ring
TWICE = (3, 4)  # Hopper: warpgroups that may have twice 64 rows each; others spill
ROWS = 64  # rows of weights that a warpgroup processes at a time
DEPTH = 64  # elements of K in a unit
HALVES = 2  # times 64 rows of weights in an MMA of Blackwell
BLOCKS = (1, 2)  # blocks of HALVES * ROWS rows in a tile
BITS = {"bf16": 16, "fp16": 16, "e4m3": 8}
WEIGHTS = ("nvfp4", "mxfp4")
NUMBERS = ("bf16", "fp16")  # dtypes of outputs without a scale
OUTPUTS = (*NUMBERS, "e4m3")
ACTIVATIONS = {"bf16": WEIGHTS, "e4m3": ("mxfp4",)}  # -> formats of the weights
ROW_THREADS = 128  # threads of the kernel that writes rows of tokens
# Number of computing warpgroups -> registers of their threads, of the other threads.
REGISTERS = {
    1: (240, 64), 2: (224, 56), 3: (152, 56), 4: (104, 64), 5: (80, 80), 6: (72, 72),
}  # fmt: skip
OTHERS = 28  # further registers; with fewer, ptxas serialises wgmmas (C7512)
UNIT_WORDS = 32  # words of a thread for bf16 weights of two units of K


@dataclass(frozen=True)
class MixedConfig:
    """A compiled kernel: rows of bf16 or e4m3, sorted by expert, times their expert's
    matrix.

    A launch with `least` (Hopper) runs concurrently with the previous launch, which has the other
    experts, and ends after it.
    """

    label: ClassVar = ("moe_mixed_gemm", "fmt", "x")

    fmt: str = "mxfp4"  # format of the weights
    x: str = "bf16"  # dtype of the rows
    row_scale: bool = False  # each row in e4m3 has a scale
    pair_factor: bool = False  # gate and up of an expert have separate factors
    swiglu: bool = False  # pairs of columns become one
    limit: bool = False  # they are clamped before SwiGLU
    bias: bool = False  # biases are added to the products
    out: str = "bf16"  # dtype of the output
    gather: bool = False  # rows of x are in token order, and are gathered
    tile_rows: int = 64  # rows of an expert in a tile, the N of the MMA
    teams: int = 2  # warpgroups that compute; on Blackwell, that convert weights to bf16
    parts: int = 1  # times 64 rows of weights of each warpgroup
    split: int = 1  # Hopper: CTAs of a cluster that share a tile along K
    pdl: bool = False  # programmatic dependent launch
    least: int = 0  # experts with fewer rows are left to another launch; 0: no bound
    most: int = 0  # experts with more rows are left to another launch; 0: no bound

    @property
    def format(self) -> BlockFormat:
        """Format of the weights."""
        return FORMATS[self.fmt]

    @property
    def x_bits(self) -> int:
        """Bits of an element of the rows, and of the weights as they are multiplied."""
        return BITS[self.x]

    @property
    def step(self) -> int:
        """K of an MMA."""
        return 256 // self.x_bits

    @property
    def ctas(self) -> int:
        """Number of CTAs that share a tile."""
        return self.split

    @property
    def tile_n(self) -> int:
        """Columns of the product in a tile, which are rows of the weights."""
        return ROWS * self.teams * self.parts

    def registers(self, widths: int) -> int:
        """Return the registers of a computing thread. Products of each of `widths` widths have
        separate registers for weights."""
        weights = UNIT_WORDS * self.x_bits // 16 * self.parts * widths
        return self.tile_rows * self.parts // 2 + weights + OTHERS

    @property
    def tile_outputs(self) -> int:
        """Columns of the output that a tile gives."""
        return self.tile_n // (2 if self.swiglu else 1)

    def check_values(self, arch: str) -> None:
        """Raise ValueError or NotImplementedError, naming the value and what `arch` supports."""
        format_of(self.fmt)
        if arch == "sm_100a":
            self._check_numbers()
        rows = ROWS_OF[arch]
        named = {
            "x": (self.x, tuple(ACTIVATIONS)), "out": (self.out, OUTPUTS),
            "fmt": (self.fmt, ACTIVATIONS.get(self.x, WEIGHTS)),
            "tile_rows": (self.tile_rows, rows), "teams": (self.teams, TEAMS),
            "parts": (self.parts, PARTS),
            "split": (self.split, SPLITS if arch == SPLIT_ARCH else SPLITS[:1]),
        }  # fmt: skip
        for name, (value, possible) in named.items():
            if value not in possible:
                raise NotImplementedError(f"{name} {value!r}: one of {possible}")
        if self.limit and not self.swiglu:
            raise ValueError("limit without an activation: nothing is clamped")
        if self.pair_factor and not self.swiglu:
            raise ValueError("pair_factor without an activation: there are no gate and up")
        if self.least and not self.pdl:
            raise ValueError(f"least {self.least} without pdl: it overlaps the previous launch")
        if arch == "sm_100a":
            self._check_columns()
        else:
            self._check_registers()

    def _check_numbers(self) -> None:
        """Check dtypes on Blackwell, where eight-bit rows have a separate tensor-core product."""
        for name, value in (("x", self.x), ("out", self.out)):
            if value == "e4m3":
                raise NotImplementedError(
                    f"{name} 'e4m3' on sm_100a: {NUMBERS}; for activations of 8 bits use packed "
                    "experts in mxfp4, not arranged, and activations='mxfp8'"
                )
        if self.least or self.most:
            raise NotImplementedError(
                f"least {self.least} and most {self.most} on sm_100a: 0, as one launch computes "
                "all experts"
            )

    def _check_registers(self) -> None:
        """Check registers on Hopper, where warpgroups hold weights and sums."""
        if self.parts > 1 and self.teams not in TWICE:
            raise NotImplementedError(
                f"parts {self.parts} with {self.teams} warpgroups: 1, or 2 with one of {TWICE}"
            )
        if self.split > 1 and self.tile_rows > SPLIT_ROWS:
            raise NotImplementedError(
                f"split {self.split} with tile_rows {self.tile_rows}: 1 beyond {SPLIT_ROWS} rows"
            )
        least, most = self.registers(1), REGISTERS[self.teams][0]
        if least > most:
            raise ValueError(
                f"tile_rows {self.tile_rows} with {self.teams} warpgroups of {self.parts} x {ROWS} "
                f"rows of weights in {self.x}: {least} registers of a thread, limit {most}"
            )

    def _check_columns(self) -> None:
        """Check columns on Blackwell, where tensor memory holds weights and sums."""
        blocks, odd = divmod(self.teams * self.parts, HALVES)
        if odd or blocks not in BLOCKS:
            raise NotImplementedError(
                f"teams {self.teams} of {self.parts} x {ROWS} rows of weights on sm_100a: "
                f"{' or '.join(str(HALVES * ROWS * n) for n in BLOCKS)} rows in all"
            )
        least = blocks * (self.tile_rows + 2 * unit_columns(self))
        if least > hw.TMEM_COLUMNS:
            raise ValueError(
                f"tile_rows {self.tile_rows} with {blocks} x {HALVES * ROWS} rows of weights: "
                f"{least} columns of tensor memory, limit {hw.TMEM_COLUMNS}"
            )


def unit_columns(config: MixedConfig) -> int:
    """Return the columns of tensor memory for 128 rows of weights and a unit of K."""
    return DEPTH * config.x_bits // 8 // hw.TMEM_CELL_BYTES


def fits(arch: str, tile_rows: int, teams: int, parts: int, x: str = "bf16") -> bool:
    """Return whether such tiles of rows of x exist."""
    try:
        MixedConfig(x=x, tile_rows=tile_rows, teams=teams, parts=parts).check_values(arch)
    except (NotImplementedError, ValueError):
        return False
    return True


@dataclass(frozen=True)
class RowsConfig:
    """The kernel that writes tokens in the order of their experts."""

    out: str = "bf16"  # dtype of the rows
    by_expert: bool = True  # tokens have slots with a row each; else a row is a token

    @property
    def vector(self) -> int:
        """Elements that a thread writes at a time."""
        return 8 * hw.TMA_ALIGN_BYTES // BITS[self.out]

    @property
    def unroll(self) -> int:
        """Vectors whose loads a thread has in flight."""
        return 4 if self.out == "bf16" else 1
