"""Cells that an instruction touches, in the granularity of the shadows.

Shared memory: `grain` bytes per cell. Tensor memory: 16 lanes of a column per cell, since only
tcgen05.cp.4x256b separates the lanes of such a group; cell = column * 8 + lane / 16.
"""

from __future__ import annotations

import mmap
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from ptxemu.machine.mma import Metadata, Mma
from ptxemu.machine.scale_factors import Placement
from ptxemu.machine.tensor_core import line_bytes
from ptxemu.machine.tmem import LANES, SHAPES, SHIFTED_COLUMNS, register_map
from ptxemu.machine.tmem_fill import Fill
from ptxemu.machine.umma_desc import InstrDesc, SmemDesc, operand_shape, operand_words
from ptxemu.numerics.formats import TENSOR_COLUMNS

Where = slice | np.ndarray  # an index of cells


def blank(count: int) -> np.ndarray:
    """Return int64 zeros of which few will be written: pages are allocated on first touch."""
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return np.frombuffer(mmap.mmap(-1, 8 * count, flags=anonymous), np.int64)


class Pattern:
    """`cells` in their order, as runs of `run` that begin at `starts`, which lie at `address`."""

    __slots__ = ("cells", "run", "starts", "address")

    def __init__(self, cells: np.ndarray) -> None:
        self.cells = cells
        cells.flags.writeable = False
        ends = np.flatnonzero(np.diff(cells) != 1) + 1
        self.run = int(np.gcd.reduce(np.append(ends, len(cells)))) or 1
        self.starts = np.ascontiguousarray(cells[:: self.run], np.int64)
        self.address = self.starts.ctypes.data


_ONE = Pattern(np.zeros(1, np.int64))
_MOST = 32  # starts that are copied: to ask an array where it lies takes longer
_starts = np.zeros(_MOST, np.int64)  # of the latest scattered cells
_STARTS_AT = _starts.ctypes.data


class Cells:
    """A pattern that lies `base` cells further: `count` runs of `run` cells each, which begin at
    the int64 numbers at `address`, shifted right by `shift`."""

    __slots__ = ("address", "count", "run", "shift", "base", "_pattern")

    def __init__(self, pattern: Pattern, base: int = 0) -> None:
        self._pattern = pattern
        self.address, self.count, self.run = pattern.address, len(pattern.starts), pattern.run
        self.shift, self.base = 0, base

    def __len__(self) -> int:
        return self.count * self.run

    def index(self) -> Where:
        """Index into arrays of all cells of the memory."""
        return self._pattern.cells + self.base


class Span(Cells):
    """`count` cells from `first` on."""

    __slots__ = ()

    def __init__(self, first: int, count: int) -> None:
        self.address, self.count, self.run = _ONE.address, 1, count
        self.shift, self.base = 0, first

    def index(self) -> slice:
        return slice(self.base, self.base + self.run)


class Scattered(Cells):
    """Cells of `nbytes` at each of `starts`, shifted by `base` cells; index: [cell, start].

    The compiled routines may use them until the next such cells are made.
    """

    __slots__ = ("_starts", "_grain")

    def __init__(self, starts: np.ndarray, nbytes: int, grain: int, base: int = 0) -> None:
        self._starts, self._grain = starts, grain
        self.count, self.run = starts.size, max(nbytes // grain, 1)
        self.shift, self.base = grain.bit_length() - 1, base
        if self.count <= _MOST:
            _starts[: self.count] = starts
            self.address = _STARTS_AT
        else:
            self._starts = np.ascontiguousarray(starts, np.int64)
            self.address = self._starts.ctypes.data

    def index(self) -> np.ndarray:
        steps = np.arange(self.run, dtype=np.int64)[:, None] + self.base
        return self._starts.astype(np.int64) // self._grain + steps


def byte_cells(low: int, nbytes: int, grain: int) -> Span:
    """Return the cells of `nbytes` from `low` on."""
    first = low // grain
    return Span(first, -(-(low + nbytes) // grain) - first)


GROUPS = LANES // 16  # of lanes in a column
TENSOR_CELLS = TENSOR_COLUMNS * GROUPS
_WORD = 8  # bytes of what `operand_words` counts
_WINDOW = 1024  # swizzles repeat with it
_PRODUCTS = 4096  # that are kept


@lru_cache(maxsize=1024)
def _moved(shape: str, num: int, packed: bool, half_split: int) -> Pattern:
    """Cells relative to (column 0, the first lane reached) of a tcgen05.ld or .st."""
    index, _ = register_map(shape, num, packed, half_split)
    both = np.concatenate([index.ravel(), index.ravel() + LANES]) if packed else index.ravel()
    return Pattern(np.unique(both // LANES * GROUPS + both % LANES // 16))


def moved_cells(move: tuple[Any, ...], address: int, warp_in_group: int) -> Cells:
    """move: (shape, repeat count, 16-bit packing, columns between halves)."""
    shape, num, packed, half_split = move
    lane, column = address >> 16 & 16, address & 0xFFFF
    first = 2 * warp_in_group + (lane // 16 if SHAPES[shape].lanes == 16 else 0)
    return Cells(_moved(shape, num, packed, half_split), column * GROUPS + first)


def accumulator_cells(address: int, idesc: InstrDesc, cta_group: int) -> Cells:
    """D of one CTA."""
    m, cta_group = idesc.data_path(cta_group)
    column, rows = address & 0xFFFF, m // cta_group
    columns = idesc.n if rows == LANES or cta_group == 1 else idesc.n // cta_group
    if rows == LANES or cta_group > 1:
        return column_cells(column, columns)
    return Cells(_half(columns, address >> 16 & 16), column * GROUPS)


@lru_cache(maxsize=256)
def _half(columns: int, upper: int) -> Pattern:
    """Return every other group of 16 lanes of `columns` columns."""
    cells = np.arange(columns * GROUPS).reshape(-1, GROUPS)
    return Pattern(cells[:, upper // 16 :: 2].ravel())


def tensor_operand_cells(address: int, idesc: InstrDesc, cta_group: int) -> Cells:
    """A of one CTA in tensor memory: all lanes, or half of them."""
    m, _ = idesc.data_path(cta_group)
    column = address & 0xFFFF
    columns = line_bytes(idesc.a_format, idesc.a_k) // 4
    if m >= LANES:
        return column_cells(column, columns)
    return Cells(_half(columns, 16 * (address >> 20 & 1)), column * GROUPS)


def scale_cells(where: Placement) -> Cells:
    """Scale factors of A or B: all lanes."""
    return column_cells(*where.columns())


def metadata_cells(where: Metadata) -> Cells:
    """Metadata of a sparse A: the lanes of its rows."""
    groups = np.unique(where.lanes() // 16)
    columns = np.arange(where.column, where.column + where.columns)
    return Cells(Pattern((columns[:, None] * GROUPS + groups).ravel()))


def shifted_cells(address: int) -> Cells:
    """Return the cells that tcgen05.shift reads and writes: a quarter of the lanes."""
    column, first = address & 0xFFFF, address >> 20
    columns = np.arange(column, column + SHIFTED_COLUMNS)
    return Cells(Pattern((columns[:, None] * GROUPS + (first, first + 1)).ravel()))


@lru_cache(maxsize=1024)
def filled_cells(address: int, shape: Fill) -> Cells:
    """Return the cells that tcgen05.cp writes."""
    column, first = address & 0xFFFF, address >> 16
    groups = np.unique((first + shape.lanes()) // 16)
    columns = np.arange(column, column + shape.nbytes // 4)
    return Cells(Pattern((columns[:, None] * GROUPS + groups).ravel()))


def column_cells(column: int, columns: int) -> Span:
    return Span(column * GROUPS, columns * GROUPS)


@lru_cache(maxsize=4096)
def _operand(desc: SmemDesc, shape: tuple[int, int], mn_major: bool, grain: int) -> Pattern:
    words, _ = operand_words(desc, shape, mn_major)
    cells = words.reshape(-1, 1) * (_WORD // grain) + np.arange(_WORD // grain)
    return Pattern(np.sort(cells.ravel()))


def operand_cells(desc: SmemDesc, rows: int, k: int, fmt: str, mn_major: bool, grain: int) -> Cells:
    """An operand of an MMA in shared memory."""
    return matrix_cells(desc, operand_shape(rows, k, fmt, mn_major), grain, mn_major=mn_major)


@lru_cache(maxsize=4096)
def matrix_cells(
    desc: SmemDesc, shape: tuple[int, int], grain: int, *, mn_major: bool = False
) -> Cells:
    """A matrix of (lines, bytes of a line) in shared memory."""
    phase = desc.start % _WINDOW
    base = (desc.start - phase) // grain
    return Cells(_operand(replace(desc, start=phase), shape, mn_major, grain), base)


class Product:
    """Cells that an MMA by `group` CTAs touches in each of them.

    They are B, A (in shared or in tensor memory) and D. tensor: mask of those in tensor memory.
    """

    def __init__(self, mma: Mma, group: int, grain: int) -> None:
        self._of = mma.a, mma.b, mma.instr  # it is known by their identities
        instr = mma.instr
        self.b = operand_cells(mma.b, *instr.shape_of_b(group), grain)
        self.a: Cells | None = None
        self.tensor_a: Cells | None = None
        if isinstance(mma.a, int):
            self.tensor_a = tensor_operand_cells(mma.a, instr, group)
        else:
            self.a = operand_cells(mma.a, *instr.shape_of_a(group), grain)
        self.d = accumulator_cells(mma.d, instr, group)
        self.tensor = bits(self.d) | (bits(self.tensor_a) if self.tensor_a is not None else 0)


_products: dict[tuple[int, ...], Product] = {}


def product(mma: Mma, group: int, grain: int) -> Product:
    """Kept by the identities of the descriptors: to compare them costs more than all else."""
    a = mma.a if isinstance(mma.a, int) else id(mma.a)
    key = isinstance(mma.a, int), a, id(mma.b), id(mma.instr), mma.d, group, grain
    found = _products.get(key)
    if found is None:
        if len(_products) >= _PRODUCTS:
            _products.clear()
        found = _products[key] = Product(mma, group, grain)
    return found


def bits(cells: Cells) -> int:
    """A bit for each cell of tensor memory that is one of `cells`."""
    flags = np.zeros(TENSOR_CELLS, np.bool_)
    flags[cells.index()] = True
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")
