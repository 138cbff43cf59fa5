"""Where the accesses of a warp are noted, see `native.accesses`: by primitives, and by those that
Python does."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from ptxemu.native.accesses import BANKS, FIRST, NEXT, ROOM, SHARED, kind, note_global, note_shared
from ptxemu.native.library import compiled
from ptxemu.native.routines import Pointer, p_i64, p_u8, p_u32

_START = 1 << 12  # words
_ONE = 1 << 16  # pass
_ACTIVE = [
    np.array([lane < count for lane in range(BANKS)], np.uint8) for count in range(BANKS + 1)
]
_kind = cache(kind)


class Notes:
    """The accesses of a warp. address: what primitives are told."""

    def __init__(self) -> None:
        self._words = np.zeros(FIRST + _START, np.int64)
        self._words[NEXT], self._words[ROOM] = FIRST, len(self._words)
        self._shared, self._global = np.zeros(BANKS, np.uint32), np.zeros(BANKS, np.int64)
        self._full: list[np.ndarray] = []
        self.address = self._words.ctypes.data

    def add(self, memory: str, store: bool, nbytes: int, starts: int | np.ndarray) -> None:
        """An access that no primitive did. starts: of its lanes, or one of all of them."""
        what = _kind(memory, store, nbytes)
        if isinstance(starts, int):
            self._put(what | _ONE, starts)
        else:
            self._put_lanes(memory == SHARED, what, starts)

    def add_idle(self, memory: str, nbytes: int) -> None:
        """An access that asks nothing of memory."""
        self._put(_kind(memory, False, nbytes), 0)

    def _put(self, head: int, first: int) -> None:
        place = self._place()
        self._words[place], self._words[place + 1] = head, first
        self._words[NEXT] = place + 2

    def _place(self) -> int:
        """Where the next access goes."""
        if self._words[NEXT] + 2 > len(self._words):
            self._full.append(self._words[FIRST : self._words[NEXT]].copy())
            self._words[NEXT] = FIRST
        return int(self._words[NEXT])

    def _put_lanes(self, shared: bool, what: int, starts: np.ndarray) -> None:
        self._place()
        note: Callable[..., int] = note_shared if shared else note_global
        row: np.ndarray = self._shared if shared else self._global
        pointer: type[Pointer] = p_u32 if shared else p_i64
        active, row[: len(starts)] = _ACTIVE[len(starts)], starts
        found = compiled(note)
        if found is None:
            note(p_i64(self._words), pointer(row), p_u8(active), what)
        else:
            found(self.address, row.ctypes.data, active.ctypes.data, what)

    def words(self) -> np.ndarray:
        """Two of each access."""
        return np.concatenate([*self._full, self._words[FIRST : self._words[NEXT]]])
