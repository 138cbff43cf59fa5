"""Cells of a memory that an access touches: for numpy an index, for machine code runs of cells."""

from __future__ import annotations

import mmap

import numpy as np

Where = slice | np.ndarray  # an index of cells


def blank(count: int) -> np.ndarray:
    """Zeros, int64, of which few will be written: pages are there once they are touched."""
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
        """In arrays of all cells of the memory."""
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
    """Those of `nbytes` at each of `starts`, shifted by `base` cells. For machine code they are
    there until the next such cells are made. index: [cell, start]."""

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
    """Of `nbytes` from `low` on."""
    first = low // grain
    return Span(first, -(-(low + nbytes) // grain) - first)
