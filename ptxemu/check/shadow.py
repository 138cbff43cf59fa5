"""Shadow of a memory: for each cell, the last write, and one read by every component.

A read needs the last write to be ordered before it. A write needs that and every read since.
Accesses before the last write are forgotten: an agent ordered after that write is ordered after all
of them.

Most accesses are ordered, which compiled code verifies quickly (`Shadow.surely`). For the others,
and without compiled code, `read` and `write` find out what is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import takewhile

import numpy as np

from ptxemu.check import frame
from ptxemu.check.agents import Agent
from ptxemu.check.clocks import (
    ALL_LANES,
    ATOMIC,
    COMPONENT_SHIFT,
    LANE_MASK,
    LANE_SHIFT,
    SITE_MASK,
    STEP_MASK,
    STEP_SHIFT,
    Mark,
    Stamp,
)
from ptxemu.check.footprints import Cells, Where
from ptxemu.check.zeros import blank, keep, zeros
from ptxemu.native import shadow as native
from ptxemu.native.shadow import (
    BARRIERS,
    CELLS,
    DEFINED,
    DONE,
    DONE_NEW,
    PLANE,
    PLANES,
    TABLE,
    WRITES,
)

_FIRST_PLANES = 7
_DENSE_PLANES = 2  # in which many cells have reads; of the others few pages are ever touched,
_SPARSE_PLANES = 8  # so several of them are one allocation

OnRace = Callable[[int, int], None]  # (packed stamp of the earlier access, a cell)


class Shadow:
    """The cells of one memory. `space`: which proxy fence counts for it."""

    def __init__(self, cells: int, space: str) -> None:
        self.space = space
        self.last = zeros(cells)
        # Stamps of reads: those of a cell, of one component each, lie in the first planes.
        self._reads: list[np.ndarray] = []
        self._sparse = np.zeros((0, cells), np.int64)  # planes that are still free
        self.readers: dict[int, None] = {}  # components, in the order of their first reads
        # Below atomics, of which none waits for another: the last write that was none.
        self.below: np.ndarray | None = None
        self.barriers: np.ndarray | None = None  # cells that mbarriers have, or have had
        # Addresses of `last`, and then of the planes.
        self._table = np.zeros(_FIRST_PLANES + 1, np.int64)
        self._table[0] = frame.address_of(self.last)
        self._words, self.at = frame.words(*[0] * native.MEMORY_WORDS)
        self._words[TABLE], self._words[CELLS] = frame.address_of(self._table), cells
        self.all_written = False  # whether `surely` has seen, this last time, no unwritten cell
        self._routines = frame.routines()
        self._visit = self._routines and self._routines.visit

    def wrote(self, stamp: int, cell: int) -> bool:
        """Whether this was a write, not a read."""
        below = self.below is not None and int(self.below[cell]) == stamp
        return below or int(self.last[cell]) == stamp

    def with_barriers(self) -> np.ndarray:
        """`barriers`, of a memory that has some."""
        if self.barriers is None:
            self.barriers = np.zeros(len(self.last), np.bool_)
            self._words[BARRIERS] = self.barriers.ctypes.data
        return self.barriers

    def surely(
        self, cells: Cells, by: Agent, mark: Mark, write: bool, *, defined: bool = False
    ) -> bool:
        """Record an access if it is ordered after all earlier accesses it depends on.

        Returns False, with nothing recorded, if the access has to be checked in detail.
        defined: also require that it reads written data.
        """
        stamp, lane = mark
        if isinstance(lane, int):
            if lane == ATOMIC:
                return False
        else:
            lane = frame.listed(lane)
        kind = WRITES if write else DEFINED if defined else 0
        return self.surely_one(cells, (by.at(self.space), *by.in_order), stamp, lane, kind)

    def surely_one(
        self, cells: Cells, by: tuple[int, int, int], stamp: int, lane: int, kind: int
    ) -> bool:
        """Record an access as `surely`; the parameters are those of `native.shadow.visit`."""
        if self._visit is None:
            return False
        answer = self._visit(self.at, cells.at, *by, kind, stamp, lane)
        while answer == PLANE:
            self.add_plane()
            answer = self._visit(self.at, cells.at, *by, kind, stamp, lane)
        if answer > DONE_NEW:
            return False
        self.all_written = answer == DONE
        if not kind & WRITES:
            self.readers[stamp >> COMPONENT_SHIFT] = None
        elif self.below is not None:
            self.below[cells.index()] = 0
        return True

    def writers(self, cells: Cells) -> list[int]:
        """Return the sites of the last writes, 0 for none, in ascending order."""
        if self._routines is not None and len(cells) <= len(frame.FOUND):
            count = self._routines.writers(self.at, cells.at, frame.FOUND_AT)
            if count >= 0:
                return sorted(set((frame.FOUND[:count] & SITE_MASK).tolist()))
        found: list[int] = np.unique(self.last[cells.index()] & SITE_MASK).tolist()
        return found

    def unread(self, cells: Cells) -> Counter[int]:
        """Return the sites of writes to cells that nobody has read since, and how many cells."""
        found = Counter[int]()
        if self._routines is not None and 2 * len(cells) <= len(frame.FOUND):
            count = self._routines.unread(self.at, cells.at, frame.FOUND_AT)
            if count >= 0:
                pairs = frame.FOUND[: 2 * count].tolist()
                for site, times in zip(pairs[::2], pairs[1::2], strict=True):
                    found[site] += times
                return found
        where = cells.index()
        last = self.last[where]
        fresh = last != 0
        if self._reads:
            fresh &= self._reads[0][where] == 0
        found.update((last[fresh] & SITE_MASK).tolist())
        return found

    def give_back(self) -> None:
        """Nobody accesses the memory any more: let other shadows use the arrays."""
        keep((self.last, *self._reads[:_DENSE_PLANES]))
        self.last, self._reads = self.last[:0], []
        self._words[CELLS] = self._words[PLANES] = 0

    def add_plane(self) -> None:
        """Make room for reads by one more component; few cells are read by many."""
        count = len(self._reads) + 1
        self._reads.append(self._plane(count))
        if count >= len(self._table):
            self._table = np.concatenate([self._table, np.zeros_like(self._table)])
            self._words[TABLE] = self._table.ctypes.data
        self._table[count] = frame.address_of(self._reads[-1])
        self._words[PLANES] = count

    def _plane(self, number: int) -> np.ndarray:
        """Return zeros for the plane of that number, from 1 on."""
        cells = len(self.last)
        if number <= _DENSE_PLANES:
            return zeros(cells)
        if not len(self._sparse):
            self._sparse = blank(_SPARSE_PLANES * cells).reshape(_SPARSE_PLANES, cells)
        plane, self._sparse = self._sparse[0], self._sparse[1:]
        return plane

    def read(self, where: Where, by: Agent, mark: Mark, on_race: OnRace) -> None:
        check = _Check(where, by.seen(True, self.space), by, mark.lane, on_race)
        check(self.last[where])
        component = mark.stamp >> COMPONENT_SHIFT
        self.readers[component] = None
        number, rest = 0, np.True_
        while True:
            if number == len(self._reads):
                self.add_plane()
            plane = self._reads[number]
            old = plane[where]
            free = (old == 0) | (old >> COMPONENT_SHIFT == component)
            plane[where] = np.where(free & rest, mark.packed, old)
            rest = rest & ~free
            if not rest.any():
                break
            number += 1

    def write(self, where: Where, by: Agent, mark: Mark, on_race: OnRace) -> None:
        check = _Check(where, by.seen(True, self.space), by, mark.lane, on_race)
        check(self.last[where])
        self._below_atomics(where, mark, check)
        check.seen = by.seen(False, self.space)
        for old in self.reads(where):
            check(old)
        for plane in self._reads:
            if not plane[where].any():
                break
            plane[where] = 0
        self.last[where] = mark.packed

    def reads(self, where: Where) -> Iterator[np.ndarray]:
        """Stamps of the reads since the last writes, of one component after the other."""
        planes = list(takewhile(np.any, (plane[where] for plane in self._reads)))
        if not planes:
            return
        components = [old >> COMPONENT_SHIFT for old in planes]
        if len(planes) == 1 and (components[0] == components[0].flat[0]).all():
            yield planes[0]
            return
        met = set[int]().union(*(each.ravel().tolist() for each in components))
        for component in self.readers:
            if component in met:
                own = (old * (of == component) for old, of in zip(planes, components, strict=True))
                yield reduce(np.add, own)

    def _below_atomics(self, where: Where, mark: Mark, check: _Check) -> None:
        """Check an atomic: not against the previous atomic, but against the write before them."""
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
    """Return a mask of the stamps that come from atomics."""
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
    """Return a mask of the stamps `old` that an access of `lane` is not ordered after.

    Args:
        seen: Last known step of each component.
        by: The accessing agent; None if the stamps are of another cluster.
    """
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
    """Return a mask of accesses `old` by other lanes of the warp that `lane` is not ordered after.

    These are accesses since the lanes last synchronised.
    """
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
