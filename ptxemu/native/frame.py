"""Places of the 32-lane values of a program.

Registers are in one file of each warp, all other values in one scratch. The scratch belongs to the
program, whose blocks run one at a time. It has cells of 8 bytes, which bring scalars to lanes and
masks back; constants, which stay; and the values of the running block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ptxemu.native.ir import BITS, LANES, NUMPY, WORD, Key, row_bytes
from ptxemu.native.library import Library, aligned

SCRATCH = -(2**31)  # places there have this bit; those in a file have not
_CELLS = 512
_CONSTANTS = 1024
_ROOM = 1 << 19  # bytes for the values of a block
_FIRST_CONSTANT = 8 * _CELLS
_FIRST_VALUE = _FIRST_CONSTANT + 256 * _CONSTANTS


Segment = Callable[[int, int], int]


class NoRoom(Exception):
    """A block needs more than the scratch has; numpy executes it."""


@dataclass
class Plan:
    """References of a block's source to a frame, as data that another frame can use.

    segments: operations, each with the places of its result and operands.
    views: place, type and rows, by name.
    constants: bits and width of the constants in segments, by their place in the first frame.
    """

    segments: list[list[tuple[Key, list[int]]]]
    views: dict[str, tuple[int, str, int]]
    constants: dict[int, tuple[int, int]] = field(default_factory=dict)


class Frame:
    """The scratch of one program, and the places of its registers in the files of its warps."""

    def __init__(self, library: Library, slots: dict[int, str]) -> None:
        """slots: of the registers that are always arrays, with their types."""
        self.library = library
        self.offsets: dict[int, int] = {}
        self.file_bytes = 0
        for slot, dtype in slots.items():
            self.offsets[slot] = self.file_bytes
            self.file_bytes += row_bytes(dtype)
        self._files: list[tuple[np.ndarray, int]] = []  # of warps that are done
        self._words: list[np.ndarray] = []
        self._constants: dict[tuple[int, int], int] = {}
        self._constant_at: dict[int, tuple[int, int]] = {}  # place -> bits, width
        self._scratch = aligned(_FIRST_VALUE + _ROOM)
        cells: Any = self._scratch[:_FIRST_CONSTANT].data
        self.cells = {code: cells.cast(code) for code in "Qqd"}

    def new_file(self) -> tuple[np.ndarray, int]:
        """Registers of a warp, bytes, all zero; and their address."""
        if not self._files:
            file = aligned(self.file_bytes)
            return file, file.ctypes.data
        file, address = self._files.pop()
        file.fill(0)
        return file, address

    def free_file(self, file: np.ndarray, address: int) -> None:
        self._files.append((file, address))

    # -- places -----------------------------------------------------------------------------

    def constant(self, bits: int, dtype: str) -> int:
        """The place of 32 copies of it."""
        return self._constant(bits, BITS[dtype])

    def _constant(self, bits: int, width: int) -> int:
        key = bits, width
        if key not in self._constants:
            if len(self._constants) == _CONSTANTS:
                raise NoRoom
            start = _FIRST_CONSTANT + 256 * len(self._constants)
            size = LANES * width // 8
            self._scratch[start : start + size].view(f"u{width // 8}")[:] = bits
            self._constants[key] = start
            self._constant_at[SCRATCH + start] = key
        return SCRATCH + self._constants[key]

    @staticmethod
    def cell(number: int) -> int:
        """The place of a cell."""
        if number >= _CELLS:
            raise NoRoom
        return SCRATCH + 8 * number

    @staticmethod
    def room(offset: int, nbytes: int) -> int:
        """The place of a value of the block, `offset` bytes from the first."""
        if offset + nbytes > _ROOM:
            raise NoRoom
        return SCRATCH + _FIRST_VALUE + offset

    def view(self, place: int, dtype: str, rows: int = 0) -> np.ndarray:
        """A value in the scratch as [32], or [rows, 32]."""
        start, step = place - SCRATCH, row_bytes(dtype)
        size = LANES * BITS[dtype] // 8
        if not rows:
            return self._scratch[start : start + size].view(NUMPY[dtype])
        table = self._scratch[start : start + rows * step].reshape(rows, step)[:, :size]
        return table.view(NUMPY[dtype])

    # -- programs ---------------------------------------------------------------------------

    def plan(
        self, segments: list[list[tuple[Key, list[int]]]], views: dict[str, tuple[int, str, int]]
    ) -> Plan:
        """Return a plan that has the constants of this frame."""
        places = {place for segment in segments for _, places in segment for place in places}
        used = sorted(places & self._constant_at.keys())  # as they came
        return Plan(segments, views, {place: self._constant_at[place] for place in used})

    def bound(self, plan: Plan) -> dict[str, Any]:
        """The names that the source of a block refers to; NoRoom for too many constants."""
        moved = {old: self._constant(*key) for old, key in plan.constants.items()}
        names: dict[str, Any] = {f"{code}_cells": cells for code, cells in self.cells.items()}
        for number, segment in enumerate(plan.segments):
            if any(old != new for old, new in moved.items()):
                segment = [(key, [moved.get(p, p) for p in places]) for key, places in segment]
            names[f"segment_{number}"] = self.function(segment)
        for name, view in plan.views.items():
            names[name] = self.view(*view)
        return names

    def function(self, operations: Sequence[tuple[Key, Sequence[int]]]) -> Segment:
        """Return the function that executes operations, each with the places of its result and
        operands.

        Its arguments are the addresses of the file and the context. It returns non-zero if the last
        operation leaves its work to Python.
        """
        words = np.zeros((len(operations) + 1, WORD), np.uint8)
        codes, places = words.view(np.uint64), words.view(np.int32)
        addresses = self.library.addresses
        for row, (key, operands) in enumerate(operations):
            codes[row, 0] = addresses[key]
            places[row, 2 : 2 + len(operands)] = operands
        codes[-1, 0] = addresses["end", ()]
        self._words.append(words)  # to keep them alive
        return partial(self.library.segment, words.ctypes.data, self._scratch.ctypes.data)
