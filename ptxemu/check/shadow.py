"""Who touched each cell of a memory last: the write, and one read by every component.

A read needs the last write to be ordered before it; a write needs that and every read since. What
came before the last write is forgotten: whoever is ordered after that is ordered after all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from ptxemu.check.clocks import (
    ALL_LANES,
    COMPONENT_SHIFT,
    LANE_MASK,
    LANE_SHIFT,
    STEP_MASK,
    STEP_SHIFT,
)

Where = slice | np.ndarray  # of cells


class Agent(Protocol):
    """Whoever accesses: up to which step of each component it is ordered after writes and reads,
    and the lane of its warp. Accesses of the same warp (`own`) by another lane are ordered only
    below step `synced`, where the warp last came together.
    """

    own: int
    synced: int

    def seen(self, write: bool, space: str) -> np.ndarray: ...


OnRace = Callable[[int, int], None]  # (packed stamp of the earlier access, a cell)


class Shadow:
    """The cells of one memory. `space`: which proxy fence counts for it."""

    def __init__(self, cells: int, space: str) -> None:
        self.space = space
        self.last = np.zeros(cells, np.int64)
        self.readers: dict[int, np.ndarray] = {}  # component -> stamps

    def read(
        self, where: Where, by: Agent, mark: int | np.ndarray, lane: object, on_race: OnRace
    ) -> None:
        """`mark`: the stamp of this access, or one per cell; `lane` likewise."""
        self._check(self.last[where], where, by, lane, True, on_race)
        component = int(mark if np.ndim(mark) == 0 else mark.flat[0]) >> COMPONENT_SHIFT
        row = self.readers.get(component)
        if row is None:
            row = self.readers[component] = np.zeros(len(self.last), np.int64)
        row[where] = mark

    def write(
        self, where: Where, by: Agent, mark: int | np.ndarray, lane: object, on_race: OnRace
    ) -> None:
        self._check(self.last[where], where, by, lane, True, on_race)
        for row in self.readers.values():
            old = row[where]
            if old.any():
                self._check(old, where, by, lane, False, on_race)
                row[where] = 0
        self.last[where] = mark

    def _check(
        self,
        old: np.ndarray,
        where: Where,
        by: Agent,
        lane: object,
        was_write: bool,
        on_race: OnRace,
    ) -> None:
        seen = by.seen(was_write, self.space)
        first = int(old.flat[0]) if old.size else 0
        if not np.ndim(lane) and (old == first).all():
            if first and _unordered_one(first, seen, by, lane):
                on_race(first, _cell(where, 0))
            return
        bad = _unordered(old, seen, by, lane)
        if bad.any():
            position = int(np.flatnonzero(bad)[0])
            on_race(int(old.flat[position]), _cell(where, position))


def _unordered_one(old: int, seen: np.ndarray, by: Agent, lane: int) -> bool:
    component, step = old >> COMPONENT_SHIFT, old >> STEP_SHIFT & STEP_MASK
    if component >= len(seen) or step > seen[component]:
        return True
    if component != by.own or step < by.synced or lane == ALL_LANES:
        return False
    return (old >> LANE_SHIFT & LANE_MASK) not in (lane, ALL_LANES)


def _unordered(old: np.ndarray, seen: np.ndarray, by: Agent, lane: object) -> np.ndarray:
    component, step = old >> COMPONENT_SHIFT, old >> STEP_SHIFT & STEP_MASK
    if int(component.max()) >= len(seen):
        seen = np.concatenate([seen, np.zeros(int(component.max()) + 1 - len(seen), seen.dtype)])
    bad = step > seen[component]
    own = (component == by.own) & (step >= by.synced)
    if own.any():
        was = old >> LANE_SHIFT & LANE_MASK
        bad |= own & (was != lane) & (was != ALL_LANES) & (np.asarray(lane) != ALL_LANES)
    return bad


def _cell(where: Where, position: int) -> int:
    if isinstance(where, slice):
        return where.start + position
    return int(where.flat[position])
