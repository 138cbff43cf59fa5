"""The block-scaled number formats, and the layout of their scale factors. Plain data.

A block is `block` consecutive elements of a row, along K, with one scale factor. Scale factors are
one byte each, in R rows and C = K / block columns. They are stored in atoms of 128 rows and 4
columns, 512 bytes that tcgen05.cp moves into tensor memory unchanged. CUTLASS calls this layout
"128x4"; it is also that of cuBLAS's VEC16_UE4M3 and VEC32_UE8M0.

    byte of (row, column) = (row / 128) ceil(C / 4) 512 + (column / 4) 512
                          + (row % 32) 16 + (row % 128 / 32) 4 + column % 4

Bytes of missing rows or columns are 0, which is not NaN in either scale format. The ceil(C / 4)
atoms of 128 rows are a block. If rows are sorted by expert, every expert begins a new block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

SCALE_ROWS = 128  # rows of an atom
SCALE_COLUMNS = 4
SCALE_ATOM_BYTES = SCALE_ROWS * SCALE_COLUMNS

SCALINGS = ("token", "tensor")  # sources of the amax of a global scale

E2M1_LARGEST = 6.0
E4M3_LARGEST = 448.0


@dataclass(frozen=True)
class BlockFormat:
    """A block format: value = element * scale, divided by the global scale if there is one."""

    name: str
    element: str  # 'e2m1' (two per byte along K, the even one in the low 4 bits) or 'e4m3'
    block: int  # elements that share a scale factor
    scale: str  # 'e4m3' (never negative) or 'ue8m0'
    largest: float  # the largest element
    has_global: bool  # there are also fp32 factors of a tensor, row or expert

    @cached_property
    def per_byte(self) -> int:
        """Elements of a byte."""
        return 2 if self.element == "e2m1" else 1

    @cached_property
    def amax_target(self) -> float:
        """Largest magnitude of a tensor times its global scale: 2688 for NVFP4."""
        if not self.has_global:
            raise ValueError(f"{self.name} has no global scale")
        return self.largest * E4M3_LARGEST

    def columns(self, k: int) -> int:
        """Scale factors of a row of k elements. ValueError unless blocks divide the row."""
        if k < self.block or k % self.block:
            raise ValueError(f"K = {k} in {self.name}: a positive multiple of {self.block}")
        return k // self.block


FORMATS = {
    form.name: form
    for form in (
        BlockFormat("nvfp4", "e2m1", 16, "e4m3", E2M1_LARGEST, has_global=True),
        BlockFormat("mxfp4", "e2m1", 32, "ue8m0", E2M1_LARGEST, has_global=False),
        BlockFormat("mxfp8", "e4m3", 32, "ue8m0", E4M3_LARGEST, has_global=False),
    )
}
"""Block formats by name."""


def format_of(name: str) -> BlockFormat:
    """The format of this name, or TypeError or ValueError."""
    if not isinstance(name, str):
        raise TypeError(f"fmt is {type(name).__name__}, expected str: one of {[*FORMATS]}")
    if name not in FORMATS:
        raise ValueError(f"format {name!r}: one of {', '.join(FORMATS)}")
    return FORMATS[name]


def scale_atoms(columns: int) -> int:
    """Atoms beside each other that hold `columns` scale factors of a row."""
    return -(-columns // SCALE_COLUMNS)


def scale_atoms_of(fmt: str, k: int) -> int:
    """Atoms beside each other that hold the scale factors of a row of k elements."""
    return scale_atoms(FORMATS[fmt].columns(k))


def scale_bytes(blocks: int, columns: int) -> int:
    """Bytes of the scale factors of `blocks` blocks of 128 rows."""
    return blocks * scale_atoms(columns) * SCALE_ATOM_BYTES


def row_blocks(rows: int) -> int:
    """Blocks of 128 rows that hold `rows` rows."""
    return -(-rows // SCALE_ROWS)


def scale_blocks(rows: int, experts: int) -> int:
    """Blocks of 128 rows that always suffice for `rows` rows sorted by expert, whatever the counts.

    Every expert that has rows adds at most one block that is not full, so that nobody reads the
    counts to allocate.
    """
    used = min(rows, experts)  # experts that have rows
    return (rows - used) // SCALE_ROWS + used
