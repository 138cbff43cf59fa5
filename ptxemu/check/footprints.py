"""Cells that an instruction touches, in the granularity of the shadows.

Shared memory: `grain` bytes per cell. Tensor memory: 16 lanes of a column per cell, since only
tcgen05.cp.4x256b separates the lanes of such a group; cell = column * 8 + lane / 16.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, reduce
from operator import or_
from typing import Any

import numpy as np

from ptxemu.check import frame
from ptxemu.machine.mma import Metadata, Mma, metadata_at
from ptxemu.machine.scale_factors import Placement
from ptxemu.machine.tensor_core import line_bytes
from ptxemu.machine.tmem import LANES, SHAPES, SHIFTED_COLUMNS, register_map
from ptxemu.machine.tmem_fill import Fill
from ptxemu.machine.umma_desc import InstrDesc, SmemDesc, operand_shape, operand_words
from ptxemu.numerics.formats import TENSOR_COLUMNS

Where = slice | np.ndarray  # an index of cells


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
    """A pattern that lies `base` cells further: `count` runs of `run` cells each.

    `at`: address of the words that describe the place to the routines of `native.shadow`.
    """

    __slots__ = ("count", "run", "base", "at", "_words", "_pattern", "_mask")

    def __init__(self, pattern: Pattern, base: int = 0) -> None:
        self._pattern = pattern
        self._place(pattern.address, len(pattern.starts), pattern.run, 0, base)

    def _place(self, address: int, count: int, run: int, shift: int, base: int) -> None:
        """Runs begin at the int64 numbers at an address, shifted right."""
        self.count, self.run, self.base, self._mask = count, run, base, 0
        self._words, self.at = frame.words(address, count, run, shift, base)

    def __len__(self) -> int:
        return self.count * self.run

    @property
    def mask(self) -> int:
        """A bit for each cell of tensor memory that is one of them."""
        self._mask = self._mask or bits(self)
        return self._mask

    def index(self) -> Where:
        """Index into arrays of all cells of the memory."""
        return self._pattern.cells + self.base


class Span(Cells):
    """`count` cells from `first` on."""

    __slots__ = ()

    def __init__(self, first: int, count: int) -> None:
        self._place(_ONE.address, 1, count, 0, first)

    def index(self) -> slice:
        return slice(self.base, self.base + self.run)


class Scattered(Cells):
    """Cells of `nbytes` at each of `starts`, shifted by `base` cells; index: [cell, start].

    The compiled routines may use them until the next such cells are made.
    """

    __slots__ = ("_starts", "_grain")

    def __init__(self, starts: np.ndarray, nbytes: int, grain: int, base: int = 0) -> None:
        self._starts, self._grain = starts, grain
        if starts.size <= _MOST:
            _starts[: starts.size] = starts
            address = _STARTS_AT
        else:
            self._starts = np.ascontiguousarray(starts, np.int64)
            address = self._starts.ctypes.data
        run, shift = max(nbytes // grain, 1), grain.bit_length() - 1
        self._place(address, starts.size, run, shift, base)

    def index(self) -> np.ndarray:
        steps = np.arange(self.run, dtype=np.int64)[:, None] + self.base
        return self._starts.astype(np.int64) // self._grain + steps


@lru_cache(maxsize=8192)
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


@lru_cache(maxsize=4096)
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


@lru_cache(maxsize=1024)
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


class Footprint:
    """Cells that one operation touches in a CTA.

    accesses: in their order (cells, whether of tensor memory, whether they are written).
    """

    def __init__(self, *accesses: tuple[Cells, bool, bool]) -> None:
        self.accesses = accesses


class Product(Footprint):
    """Cells that an MMA by `group` CTAs touches in each of them.

    They are B, A (in shared or in tensor memory), scale factors and D. tensor: mask of those in
    tensor memory.
    """

    def __init__(self, mma: Mma, group: int, grain: int) -> None:
        # It is known by their identities.
        self._of = mma.a, mma.b, mma.instr, mma.scales, mma.metadata
        instr = mma.instr
        self.b = operand_cells(mma.b, *instr.shape_of_b(group), grain)
        self.a: Cells | None = None
        self.tensor_a: Cells | None = None
        if isinstance(mma.a, int):
            self.tensor_a = tensor_operand_cells(mma.a, instr, group)
        else:
            self.a = operand_cells(mma.a, *instr.shape_of_a(group), grain)
        placements = mma.scales.placements(instr, group) if mma.scales else ()
        self.scales = [scale_cells(where) for where in placements]
        self.d = accumulator_cells(mma.d, instr, group)
        in_tensor = (self.d, *self.scales, *filter(None, (self.tensor_a,)))
        self.tensor = reduce(or_, map(bits, in_tensor))
        reads = [(self.b, False, False)]
        if self.a is not None:
            reads.append((self.a, False, False))
        elif self.tensor_a is not None:
            reads.append((self.tensor_a, True, mma.shift))
        if mma.metadata is not None:
            reads.append((metadata_cells(metadata_at(mma.metadata, instr, group)), True, False))
        reads += [(scales, True, False) for scales in self.scales]
        super().__init__(*reads, (self.d, True, True))


_products: dict[tuple[Any, ...], Product] = {}


# The latest products by identity of their MMA, which is decoded once: the MMA itself, the product.
_latest: dict[tuple[int, int, int], tuple[Mma, Product]] = {}


def product(mma: Mma, group: int, grain: int) -> Product:
    """Return the cells of an MMA."""
    key = id(mma), group, grain
    found = _latest.get(key)
    if found is not None:
        return found[1]
    if len(_latest) >= _PRODUCTS:
        _latest.clear()
    made = _product(mma, group, grain)
    _latest[key] = mma, made  # while it is here nothing else has its identity
    return made


def _product(mma: Mma, group: int, grain: int) -> Product:
    """Kept by the identities of the descriptors: to compare them costs more than all else."""
    a = mma.a if isinstance(mma.a, int) else id(mma.a)
    others = id(mma.b), id(mma.instr), id(mma.scales), id(mma.metadata), mma.shift
    key = isinstance(mma.a, int), a, others, mma.d, group, grain
    found = _products.get(key)
    if found is None:
        if len(_products) >= _PRODUCTS:
            _products.clear()
        found = _products[key] = Product(mma, group, grain)
    return found


@lru_cache(maxsize=1024)
def fill(desc: SmemDesc, address: int, shape: Fill, grain: int) -> Footprint:
    """Cells of tcgen05.cp."""
    source = matrix_cells(desc, shape.matrix, grain)
    return Footprint((source, False, False), (filled_cells(address, shape), True, True))


def bits(cells: Cells) -> int:
    """A bit for each cell of tensor memory that is one of `cells`."""
    flags = np.zeros(TENSOR_CELLS, np.bool_)
    flags[cells.index()] = True
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")
