"""Which cells an instruction touches, in the grain of the shadows.

Shared memory: `grain` bytes to a cell. Tensor memory: 16 lanes of a column to a cell, since only
tcgen05.cp.4x256b separates the lanes of such a group; cell = column * 8 + lane / 16.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from ptxemu.machine.operand_format import line_bytes
from ptxemu.machine.scale_factors import Placement
from ptxemu.machine.tmem import COLUMNS, LANES, SHAPES, SHIFTED_COLUMNS, register_map
from ptxemu.machine.tmem_fill import Fill
from ptxemu.machine.tmem_metadata import Metadata
from ptxemu.machine.umma_desc import InstrDesc, SmemDesc, operand_shape, operand_words

GROUPS = LANES // 16  # of lanes in a column
TENSOR_CELLS = COLUMNS * GROUPS
_WORD = 8  # bytes of what `operand_words` counts
_WINDOW = 1024  # swizzles repeat with it


@lru_cache(maxsize=1024)
def _moved(shape: str, num: int, packed: bool, half_split: int) -> np.ndarray:
    """Cells relative to (column 0, the first lane reached) of a tcgen05.ld or .st."""
    index, _ = register_map(shape, num, packed, half_split)
    both = np.concatenate([index.ravel(), index.ravel() + LANES]) if packed else index.ravel()
    cells = np.unique(both // LANES * GROUPS + both % LANES // 16)
    cells.flags.writeable = False
    return cells


def moved_cells(move: tuple[Any, ...], address: int, warp_in_group: int) -> np.ndarray:
    """move: (shape, repeat count, 16-bit packing, columns between halves)."""
    shape, num, packed, half_split = move
    lane, column = address >> 16 & 16, address & 0xFFFF
    first = 2 * warp_in_group + (lane // 16 if SHAPES[shape].lanes == 16 else 0)
    return _moved(shape, num, packed, half_split) + (column * GROUPS + first)


def accumulator_cells(address: int, idesc: InstrDesc, cta_group: int) -> slice | np.ndarray:
    """D of one CTA."""
    m, cta_group = idesc.data_path(cta_group)
    column, rows = address & 0xFFFF, m // cta_group
    columns = idesc.n if rows == LANES or cta_group == 1 else idesc.n // cta_group
    if rows == LANES or cta_group > 1:
        return slice(column * GROUPS, (column + columns) * GROUPS)
    upper = address >> 16 & 16
    cells = np.arange(column * GROUPS, (column + columns) * GROUPS).reshape(-1, GROUPS)
    return cells[:, upper // 16 :: 2].ravel()


def tensor_operand_cells(address: int, idesc: InstrDesc, cta_group: int) -> slice | np.ndarray:
    """A of one CTA in tensor memory: all lanes, or half of them."""
    m, _ = idesc.data_path(cta_group)
    column = address & 0xFFFF
    columns = line_bytes(idesc.a_format, idesc.a_k) // 4
    cells = slice(column * GROUPS, (column + columns) * GROUPS)
    if m >= LANES:
        return cells
    every = np.arange(cells.start, cells.stop).reshape(-1, GROUPS)
    return every[:, address >> 20 & 1 :: 2].ravel()


def scale_cells(where: Placement) -> slice:
    """Scale factors of A or B: all lanes."""
    return column_cells(*where.columns())


def metadata_cells(where: Metadata) -> np.ndarray:
    """Metadata of a sparse A: the lanes of its rows."""
    groups = np.unique(where.lanes() // 16)
    columns = np.arange(where.column, where.column + where.columns)
    return (columns[:, None] * GROUPS + groups).ravel()


def shifted_cells(address: int) -> np.ndarray:
    """What tcgen05.shift reads and writes: a quarter of the lanes."""
    column, first = address & 0xFFFF, address >> 20
    columns = np.arange(column, column + SHIFTED_COLUMNS)
    return (columns[:, None] * GROUPS + (first, first + 1)).ravel()


def filled_cells(address: int, shape: Fill) -> np.ndarray:
    """What tcgen05.cp writes."""
    column, first = address & 0xFFFF, address >> 16
    groups = np.unique((first + shape.lanes()) // 16)
    columns = np.arange(column, column + shape.nbytes // 4)
    return (columns[:, None] * GROUPS + groups).ravel()


def column_cells(column: int, columns: int) -> slice:
    return slice(column * GROUPS, (column + columns) * GROUPS)


@lru_cache(maxsize=4096)
def _operand(desc: SmemDesc, shape: tuple[int, int], mn_major: bool, grain: int) -> np.ndarray:
    words, _ = operand_words(desc, shape, mn_major)
    cells = words.reshape(-1, 1) * (_WORD // grain) + np.arange(_WORD // grain)
    cells = np.sort(cells.ravel())
    cells.flags.writeable = False
    return cells


def operand_cells(
    desc: SmemDesc, rows: int, k: int, fmt: str, mn_major: bool, grain: int
) -> np.ndarray:
    """An operand of an MMA in shared memory."""
    return matrix_cells(desc, operand_shape(rows, k, fmt, mn_major), grain, mn_major=mn_major)


def matrix_cells(
    desc: SmemDesc, shape: tuple[int, int], grain: int, *, mn_major: bool = False
) -> np.ndarray:
    """A matrix of (lines, bytes of a line) in shared memory."""
    phase = desc.start % _WINDOW
    base = (desc.start - phase) // grain
    return _operand(replace(desc, start=phase), shape, mn_major, grain) + base


def byte_cells(low: int, nbytes: int, grain: int) -> slice:
    return slice(low // grain, -(-(low + nbytes) // grain))


def bytes_of(starts: np.ndarray, nbytes: int, grain: int) -> np.ndarray:
    """Cells [cell, start] of `nbytes` at each of `starts`."""
    cells = max(nbytes // grain, 1)
    return starts // grain + np.arange(cells, dtype=np.int64)[:, None]
