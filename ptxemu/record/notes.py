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
# which lanes are active, by how many they are
_ACTIVE = (np.arange(BANKS) < np.arange(BANKS + 1)[:, None]).astype(np.uint8)
_ACTIVE_AT = _ACTIVE.ctypes.data
_kind = cache(kind)


class _Row:
    """Addresses of lanes, as a routine takes them."""

    def __init__(self, note: Callable[..., int], pointer: type[Pointer]) -> None:
        self._addresses = np.zeros(BANKS, pointer.dtype)
        self._at = self._addresses.ctypes.data
        self._note, self._pointer, self._compiled = note, pointer, compiled(note)

    def noted(self, words: np.ndarray, at: int, what: int, starts: np.ndarray) -> int:
        """1 where there is no room."""
        count = len(starts)
        self._addresses[:count] = starts
        if self._compiled is not None:
            found: int = self._compiled(at, self._at, _ACTIVE_AT + BANKS * count, what)
            return found
        return self._note(p_i64(words), self._pointer(self._addresses), p_u8(_ACTIVE[count]), what)


class Notes:
    """The accesses of a warp. address: what primitives are told."""

    def __init__(self) -> None:
        self._words = np.zeros(FIRST + _START, np.int64)
        self._words[NEXT], self._words[ROOM] = FIRST, len(self._words)
        self._shared = _Row(note_shared, p_u32)
        self._global = _Row(note_global, p_i64)
        self._full: list[np.ndarray] = []
        self.address = self._words.ctypes.data

    def add(self, memory: str, store: bool, nbytes: int, starts: int | np.ndarray) -> None:
        """An access that no primitive did. starts: of its lanes, or one of all of them."""
        what = _kind(memory, store, nbytes)
        if isinstance(starts, int):
            self._put(what | _ONE, starts)
        else:
            self._put_lanes(self._shared if memory == SHARED else self._global, what, starts)

    def add_idle(self, memory: str, nbytes: int) -> None:
        """An access that asks nothing of memory."""
        self._put(_kind(memory, False, nbytes), 0)

    def _put(self, head: int, first: int) -> None:
        if self._words[NEXT] + 2 > len(self._words):
            self._make_room()
        place = int(self._words[NEXT])
        self._words[place], self._words[place + 1] = head, first
        self._words[NEXT] = place + 2

    def _make_room(self) -> None:
        self._full.append(self._words[FIRST : self._words[NEXT]].copy())
        self._words[NEXT] = FIRST

    def _put_lanes(self, row: _Row, what: int, starts: np.ndarray) -> None:
        if row.noted(self._words, self.address, what, starts):
            self._make_room()
            row.noted(self._words, self.address, what, starts)

    def words(self) -> np.ndarray:
        """Two of each access."""
        return np.concatenate([*self._full, self._words[FIRST : self._words[NEXT]]])
