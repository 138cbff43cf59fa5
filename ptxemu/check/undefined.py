"""Cells of shared, tensor and local memory that hold undefined data, and its origin.

Each cell has a code: 0 for defined, NEVER for not written, or the number of the origin of the
undefined data stored there (`Taint.origins`). Memory is undefined when its CTA starts, tensor
memory also when it is allocated.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from ptxemu.check import footprints
from ptxemu.check.footprints import GROUPS, TENSOR_CELLS, Where, bits
from ptxemu.check.zeros import keep, left
from ptxemu.machine.mma import Metadata
from ptxemu.machine.scale_factors import Placement
from ptxemu.machine.tensor_core import CHUNK, data_bytes, line_bytes
from ptxemu.machine.tmem import LANES, Tmem, operand_lanes
from ptxemu.machine.tmem_fill import Fill, fill
from ptxemu.machine.umma_desc import InstrDesc, SmemDesc, operand_shape, operand_words
from ptxemu.numerics.formats import TENSOR_COLUMNS

NEVER = 0xFFFF
CODE = np.uint16
_BOTH = np.uint32(0x10001)
_WORD, _WINDOW = 8, 1024  # bytes that `operand_words` counts, and after which swizzles repeat


class SharedCodes:
    """Shared memory of one CTA. `last`: the race checker's stamps, 0 where nothing was written;
    undefined data is stored so seldom that its array is made on first use."""

    def __init__(self, last: np.ndarray, grain: int) -> None:
        self.last = last
        self.grain = grain
        self.stored: np.ndarray | None = None
        self._defined: set[tuple[Any, ...]] = set()  # matrices that need no further look

    def read(self, where: Where) -> np.ndarray | None:
        """Return the codes of cells; None if all are defined."""
        if self.last[where].all() and (self.stored is None or not self.stored[where].any()):
            return None
        codes = np.where(self.last[where] == 0, CODE(NEVER), CODE(0))
        return codes if self.stored is None else np.maximum(codes, self.stored[where])

    def write(self, where: Where, codes: np.ndarray | int | None) -> None:
        """Write the codes of cells; None for defined data."""
        if self.stored is None:
            if codes is None:
                return
            self.stored = np.zeros(len(self.last), CODE)
        self.stored[where] = 0 if codes is None else codes

    def operand(
        self, desc: SmemDesc, rows: int, k: int, fmt: str, mn_major: bool
    ) -> np.ndarray | None:
        """Return the code of each row of an MMA operand; None if it is defined, ignoring
        padding."""
        key = (desc, rows, k, fmt, mn_major)
        if self.stored is None and key in self._defined:
            return None
        cells = footprints.operand_cells(desc, rows, k, fmt, mn_major, self.grain)
        if self.read(cells.index()) is None:
            self._defined.add(key)
            return None
        codes = self._matrix(desc, operand_shape(rows, k, fmt, mn_major), mn_major)
        if mn_major:
            return rescale(codes.max(0)[:, None], rows)[:, 0]
        chunks = codes.reshape(rows, -1, CHUNK // self.grain)
        return _some(chunks[:, :, : -(-data_bytes(fmt) // self.grain)].max((1, 2)))

    def words(self, desc: SmemDesc, shape: tuple[int, int]) -> np.ndarray | None:
        """The code of each 32-bit word of a matrix of (rows, bytes of a row)."""
        key = (desc, *shape)
        if self.stored is None and key in self._defined:
            return None
        if self.read(footprints.matrix_cells(desc, shape, self.grain).index()) is None:
            self._defined.add(key)
            return None
        return rescale(self._matrix(desc, shape, False).T, shape[1] // 4).T

    def _matrix(self, desc: SmemDesc, shape: tuple[int, int], mn_major: bool) -> np.ndarray:
        """The codes [line, cell] of a matrix of which some are not 0."""
        phase = desc.start % _WINDOW
        words, _ = operand_words(replace(desc, start=phase), shape, mn_major)
        cells = words[:, :, None] * (_WORD // self.grain) + np.arange(_WORD // self.grain)
        codes = self.read(cells.reshape(shape[0], -1) + (desc.start - phase) // self.grain)
        assert codes is not None, "some are not 0"
        return codes

    def image(self) -> np.ndarray:
        """A byte that is 1 where shared memory is undefined, for all of it."""
        return np.repeat(self.read(slice(None)) != 0, self.grain).astype(np.uint8)


class TensorCodes(Tmem):
    """Tensor memory of one CTA: codes where there are cells. `suspects` has a bit per cell of
    `footprints`, set where a lane of it may be undefined; mostly nothing else is looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.suspects = (1 << TENSOR_CELLS) - 1

    def require(self, mask: int) -> None:
        """Do nothing: the memory checks whether columns are allocated."""

    @staticmethod
    def _new_cells() -> np.ndarray:
        """Whatever an earlier CTA has left: columns are undefined when they are allocated."""
        return left(TENSOR_COLUMNS * LANES // 2).view(np.uint32).reshape(TENSOR_COLUMNS, LANES)

    def give_back(self) -> None:
        """Nobody accesses the memory any more."""
        keep([self.cells.reshape(-1).view(np.int64)])
        self.cells = self.cells[:0]

    def forget(self, column: int, count: int) -> None:
        """Columns begin or end."""
        self.cells[column : column + count] = NEVER
        self.suspects |= bits(footprints.column_cells(column, count))

    def read(self, move: tuple[Any, ...], address: int, warp_in_group: int) -> np.ndarray | None:
        """Return the codes that tcgen05.ld reads, [register, thread]; None if all are defined."""
        if not self.suspects & _moved(move, address, warp_in_group):
            return None
        shape, number, packed, split = move
        codes = self.load(shape, number, address, warp_in_group, pack16=packed, half_split=split)
        return _some(np.maximum(codes & NEVER, codes >> 16) if packed else codes & NEVER)

    def write(
        self, move: tuple[Any, ...], address: int, warp_in_group: int, codes: np.ndarray | None
    ) -> None:
        """Write the codes of tcgen05.st; None for defined data."""
        touched = _moved(move, address, warp_in_group)
        if codes is None and not self.suspects & touched:
            return
        shape, number, unpack, split = move
        rows = np.zeros((), np.uint32) if codes is None else codes.astype(np.uint32) * _BOTH
        self.store(shape, number, address, warp_in_group, rows, unpack16=unpack, half_split=split)
        self.suspects = self.suspects & ~touched if codes is None else self.suspects | touched

    def operand(self, address: int, instr: InstrDesc, group: int) -> np.ndarray | None:
        """A of an MMA by so many CTAs: the code of each row, over all lanes that hold it."""
        if not self.suspects & _operand(address, instr, group):
            return None
        column = address & 0xFFFF
        columns = slice(column, column + line_bytes(instr.a_format, instr.a_k) // 4)
        lanes = operand_lanes(address >> 16, *instr.data_path(group))
        return _some((self.cells[columns] & NEVER).max(0)[lanes].max(0))

    def scales(self, where: Placement) -> np.ndarray | None:
        """Scale factors of an MMA: the code of each row, over all of its copies."""
        column, columns = where.columns()
        if not self.suspects & bits(footprints.column_cells(column, columns)):
            return None
        return _some(where.copies(self.cells[column : column + columns] & NEVER).max(0))

    def metadata(self, where: Metadata) -> np.ndarray | None:
        """Metadata of a sparse A: the code of each lane."""
        if not self.suspects & _metadata(where):
            return None
        columns = slice(where.column, where.column + where.columns)
        return _some((self.cells[columns] & NEVER)[:, where.lanes()].max(0))

    def fill(self, address: int, shape: Fill, codes: np.ndarray | None) -> None:
        """Write the codes of tcgen05.cp, [row, word]; None for defined data."""
        touched, whole = _filled(address, shape)
        if codes is None and not self.suspects & touched:
            return
        words = np.zeros((shape.rows, shape.nbytes // 4), np.uint32) if codes is None else codes
        fill(self, address, shape, words)
        if codes is None and whole:
            self.suspects &= ~touched
        else:
            self._look_at(touched)

    def shift(self, address: int, instr: InstrDesc, group: int) -> None:
        """A of an MMA with .ashift."""
        touched = _operand(address, instr, group)
        if self.suspects & touched:
            nbytes = line_bytes(instr.a_format, instr.a_k)
            self.shift_operand(address, instr.m, group, nbytes)
            self._look_at(touched)

    def shift_quarter(self, address: int) -> None:
        """tcgen05.shift."""
        touched = bits(footprints.shifted_cells(address))
        if self.suspects & touched:
            self.shift_rows(address)
            self._look_at(touched)

    def _look_at(self, touched: int) -> None:
        """Update `suspects` for touched cells, in which some lanes may still be undefined."""
        undefined = np.any((self.cells & NEVER).reshape(TENSOR_CELLS, -1), axis=1)
        self.suspects = self.suspects & ~touched | _to_bits(undefined) & touched

    def suspected(self, address: int, instr: InstrDesc, group: int) -> bool:
        """Whether some of D may be undefined."""
        return self.suspects & _accumulator(address, instr, group) != 0

    def accumulate(
        self, address: int, instr: InstrDesc, group: int, codes: np.ndarray, kept: np.ndarray
    ) -> None:
        """Update D of an MMA with codes [n, row]; lanes `kept` are unchanged."""
        m, ctas = instr.data_path(group)
        d = self.accumulator(address, m, instr.n, ctas)
        before = self.cells[:, kept]
        d[...] = codes.reshape(d.shape)
        self.cells[:, kept] = before
        touched = _accumulator(address, instr, group)
        clean = not (codes.any() or len(kept))
        self.suspects = self.suspects & ~touched if clean else self.suspects | touched


def _some(codes: np.ndarray) -> np.ndarray | None:
    return codes.astype(CODE) if codes.any() else None


def rescale(codes: np.ndarray, rows: int) -> np.ndarray:
    """Codes [row, lane] with as many rows as asked for: repeated, or the largest of several."""
    have = len(codes)
    if rows >= have:
        return np.repeat(codes, rows // have, axis=0)
    return codes.reshape(rows, have // rows, -1).max(1)


def _to_bits(flags: np.ndarray) -> int:
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")


@lru_cache(maxsize=4096)
def _moved(move: tuple[Any, ...], address: int, warp_in_group: int) -> int:
    return bits(footprints.moved_cells(move, address, warp_in_group))


@lru_cache(maxsize=4096)
def _filled(address: int, shape: Fill) -> tuple[int, bool]:
    """The bits of what a tcgen05.cp writes, and whether it writes all of each cell."""
    lanes = np.unique((address >> 16) + shape.lanes())
    whole = len(lanes) == LANES // GROUPS * len(np.unique(lanes // (LANES // GROUPS)))
    return bits(footprints.filled_cells(address, shape)), whole


@lru_cache(maxsize=4096)
def _metadata(where: Metadata) -> int:
    return bits(footprints.metadata_cells(where))


@lru_cache(maxsize=4096)
def _operand(address: int, instr: InstrDesc, group: int) -> int:
    return bits(footprints.tensor_operand_cells(address, instr, group))


@lru_cache(maxsize=4096)
def _accumulator(address: int, instr: InstrDesc, group: int) -> int:
    return bits(footprints.accumulator_cells(address, instr, group))
