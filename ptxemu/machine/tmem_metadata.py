"""Metadata of a sparse A in tensor memory: tcgen05.mma.sp.

A row of kinds f16 and tf32 has 32 bits for one MMA, a row of other kinds 64. MMAs name 64 bits of
each lane, two columns, the first of them even; of f16 and tf32 the sparsity selector names one of
the two. Rows lie in the lanes that D has, so that of 64 rows every other 16 lanes are used, the
same ones for A, D and metadata. Of kinds with 64 bits a row has its own lane. Of f16 and tf32 rows
r and r + 8 of every 16 share the lanes of both: the first lane has the first half of K, the one
eight lanes behind it the second, and the lower half of a word is of row r. Each CTA of a pair has
those of its own rows of A; with .ws each part of N has a copy in its lanes.
Sources: PTX ISA, "Sparsity selector" and those behind, whose layouts are figures; CUTLASS's
`tmem_e_frg` and `tmem_e_frg_ws` (cute/atom/mma_traits_sm100_frag.hpp) have the same. JAX's Mosaic
GPU (format_tcgen05_sparse_metadata; B200) and a Triton fork's dot_sparse (sm_110), both right on
GPUs, lay out f16 and 8 bits so, the latter also 64 rows, where the manual's figures of f16 and tf32
are in each other's place; there an odd column was refused as misaligned. The manual's selectors of
f16 go to 3; nobody uses 2 and 3.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ptxemu.errors import HardwareRefusal, UnsupportedPtx
from ptxemu.machine.sparsity import nibbles
from ptxemu.machine.tmem import Tmem, operand_lanes
from ptxemu.machine.umma_desc import InstrDesc


class Metadata(NamedTuple):
    """In the tensor memory of one CTA: the first lane, the first column and how many, M and CTAs of
    a dense MMA whose A has the lanes of these rows, and whether rows share lanes."""

    lane: int
    column: int
    columns: int
    path: tuple[int, int]
    wide: bool

    def lanes(self) -> np.ndarray:
        """Of each copy and row, in order, intp; rows that share lanes have them together."""
        return operand_lanes(self.lane, *self.path)

    def by_row(self, cells: np.ndarray) -> np.ndarray:
        """(copies, rows, halves of words) of cells (column, lane, half of a word)."""
        used = cells[:, self.lanes()]
        copies, rows = used.shape[1:3]
        if self.wide:  # [copy, 16 rows, half of K, row of 8, r or r + 8]
            split = used[0].reshape(copies, -1, 2, 8, 2)
            return split.transpose(0, 1, 4, 3, 2).reshape(copies, rows, 2)
        return used.transpose(1, 2, 0, 3).reshape(copies, rows, -1)


def metadata_at(address: int, idesc: InstrDesc, cta_group: int) -> Metadata:
    """Where the metadata at a TMEM address are. Raises HardwareRefusal for an odd column."""
    lane, column = address >> 16, address & 0xFFFF
    if column % 2:
        raise HardwareRefusal(f"sparsity metadata at TMEM column {column:#x}, must be even")
    wide = idesc.kind in ("f16", "tf32")
    columns = 1 if wide else 2
    return Metadata(lane, column + idesc.selector, columns, idesc.data_path(cta_group), wide)


def read_metadata(tmem: Tmem, where: Metadata) -> np.ndarray:
    """uint8 (rows, groups): the four bits of each group of A.

    Raises UnsupportedPtx for copies that differ: which product would use which is not known.
    """
    tmem.check(where.column, where.columns)
    cells = np.ascontiguousarray(tmem.cells[where.column : where.column + where.columns])
    copies = where.by_row(cells.view(np.uint16).reshape(*cells.shape, 2))
    if len(copies) > 1 and (copies != copies[0]).any():
        raise UnsupportedPtx(
            f"sparsity metadata in TMEM column {where.column:#x} differ between the parts of N"
        )
    return nibbles(np.ascontiguousarray(copies[0]).view(np.uint8))
