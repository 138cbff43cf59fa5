"""Who touched each cell of a memory last: the write, and one read by every component.

A read needs the last write to be ordered before it; a write needs that and every read since. What
came before the last write is forgotten: whoever is ordered after that is ordered after all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ptxemu.check.agents import Agent
from ptxemu.check.clocks import (
    ALL_LANES,
    ATOMIC,
    COMPONENT_SHIFT,
    LANE_MASK,
    LANE_SHIFT,
    STEP_MASK,
    STEP_SHIFT,
    Mark,
    Stamp,
)

Where = slice | np.ndarray  # of cells


OnRace = Callable[[int, int], None]  # (packed stamp of the earlier access, a cell)


class Shadow:
    """The cells of one memory. `space`: which proxy fence counts for it."""

    def __init__(self, cells: int, space: str) -> None:
        self.space = space
        self.last = np.zeros(cells, np.int64)
        self.readers: dict[int, np.ndarray] = {}  # component -> stamps
        # Below atomics, of which none waits for another: the last write that was none.
        self.below: np.ndarray | None = None

    def wrote(self, stamp: int, cell: int) -> bool:
        """Whether this was a write, not a read."""
        below = self.below is not None and int(self.below[cell]) == stamp
        return below or int(self.last[cell]) == stamp

    def read(self, where: Where, by: Agent, mark: Mark, on_race: OnRace) -> None:
        check = _Check(where, by.seen(True, self.space), by, mark.lane, on_race)
        check(self.last[where])
        component = mark.first >> COMPONENT_SHIFT
        row = self.readers.get(component)
        if row is None:
            row = self.readers[component] = np.zeros(len(self.last), np.int64)
        row[where] = mark.packed

    def write(self, where: Where, by: Agent, mark: Mark, on_race: OnRace) -> None:
        check = _Check(where, by.seen(True, self.space), by, mark.lane, on_race)
        check(self.last[where])
        self._below_atomics(where, mark, check)
        check.seen = by.seen(False, self.space)
        for row in self.readers.values():
            old = row[where]
            if old.any():
                check(old)
                row[where] = 0
        self.last[where] = mark.packed

    def _below_atomics(self, where: Where, mark: Mark, check: _Check) -> None:
        """An atomic is no race with the one before; it may be one with what that was done to."""
        if isinstance(mark.lane, np.ndarray) or mark.lane != ATOMIC:
            if self.below is not None:
                self.below[where] = 0
            return
        if self.below is None:
            self.below = np.zeros_like(self.last)
        last, below = self.last[where], self.below[where]
        check(below)
        self.below[where] = np.where(is_atomic(last), below, last)


@dataclass
class _Check:
    """Compares stamps of the cells `where` with what an access is ordered after."""

    where: Where
    seen: np.ndarray
    by: Agent
    lane: int | np.ndarray
    on_race: OnRace

    def __call__(self, old: np.ndarray) -> None:
        first = int(old.flat[0]) if old.size else 0
        lane = self.lane
        whose = self.by.own, self.by.copied
        if isinstance(lane, np.ndarray) and first >> COMPONENT_SHIFT not in whose:
            lane = ALL_LANES  # they differ in what their own warp has done only
        if not isinstance(lane, np.ndarray) and (old == first).all():
            if first and _unordered_one(first, self.seen, self.by, lane):
                self.on_race(first, _cell(self.where, 0))
            return
        bad = unordered(old, self.seen, self.by, self.lane)
        if bad.any():
            others = bad & (old >> COMPONENT_SHIFT != self.by.own)  # what orders them orders lanes
            position = int(np.flatnonzero(others if others.any() else bad)[0])
            self.on_race(int(old.flat[position]), _cell(self.where, position))


def is_atomic(stamps: np.ndarray) -> np.ndarray:
    """Which of them are of atomics."""
    return np.asarray(stamps >> LANE_SHIFT & LANE_MASK == ATOMIC)


def _unordered_one(old: int, seen: np.ndarray, by: Agent, lane: int) -> bool:
    component, step = old >> COMPONENT_SHIFT, old >> STEP_SHIFT & STEP_MASK
    was = old >> LANE_SHIFT & LANE_MASK
    if was == lane == ATOMIC:
        return False
    if component >= len(seen) or step > seen[component]:
        return True
    if component == by.copied:
        return step > by.copies_met and bool(_lanes_apart(old, by, lane))
    return component == by.own and step >= by.synced and bool(_lanes_apart(old, by, lane))


def unordered(
    old: np.ndarray, seen: np.ndarray, by: Agent | None, lane: int | np.ndarray
) -> np.ndarray:
    """Which of the stamps `old` an access of `lane` is not ordered after. `seen`: the last step
    known of each component; `by`: None where the stamps are of another cluster."""
    component, step = old >> COMPONENT_SHIFT, old >> STEP_SHIFT & STEP_MASK
    most = int(component.max(initial=0))
    if most >= len(seen):
        seen = np.concatenate([seen, np.zeros(most + 1 - len(seen), seen.dtype)])
    bad = step > seen[component]
    if by is not None:
        own = (component == by.own) & (step >= by.synced)
        if by.copied:
            own |= (component == by.copied) & (step > by.copies_met)
        if own.any():
            bad |= own & _lanes_apart(old, by, lane)
    if bad.any():
        bad &= (old >> LANE_SHIFT & LANE_MASK != ATOMIC) | (np.asarray(lane) != ATOMIC)
    return bad


def _lanes_apart(old: int | np.ndarray, by: Agent, lane: int | np.ndarray) -> np.ndarray:
    """Where an access of `lane` is not ordered after the accesses `old` of other lanes of its warp,
    made since all of them met."""
    sets = by.components.lane_sets
    apart = sets.differ(np.asarray(old) >> LANE_SHIFT & LANE_MASK, lane)
    if by.met is None or not apart.any():
        return apart
    stamps, lanes = (np.broadcast_to(each, apart.shape) for each in (old, lane))
    for place in zip(*np.nonzero(np.atleast_1d(apart)), strict=True):
        where = place if apart.ndim else ()
        earlier, now = Stamp.of(int(stamps[where])), sets.masks[lanes[where]]
        was = int(sets.masks[earlier.lane])
        if earlier.component == by.own and by.met.knows(int(now), was, earlier.step):
            apart[where] = False
    return apart


def _cell(where: Where, position: int) -> int:
    if isinstance(where, slice):
        return where.start + position
    return int(where.flat[position])
