"""What routines of the checker decide at a glance is what numpy decides: the same races, and the
same stamps behind each access."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ptxemu.check import frame
from ptxemu.check.agents import Ticket, WarpClock
from ptxemu.check.clocks import ALL_LANES, ATOMIC, Components, Mark, stamp
from ptxemu.check.footprints import Cells, Pattern, Scattered, Span
from ptxemu.check.global_memory import GlobalShadow, Piece
from ptxemu.check.shadow import Shadow
from ptxemu.native.library import library

needs_machine_code = pytest.mark.skipif(library() is None, reason="llvmlite is not installed")
CELLS, GRAIN = 96, 4
KINDS = ("", "cp.async", "tensor core", "bulk read")


class Warps:
    """Of one cluster, with what they do at random."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.components = Components()
        self.clocks = [
            WarpClock(self.components, SimpleNamespace(label=str(k), cta=None, at=k))
            for k in range(3)
        ]
        self.told: list[np.ndarray] = []
        self.tickets: list[Ticket] = []

    def order(self) -> None:
        """Something that is no access."""
        clock, other = self.random.sample(self.clocks, 2)
        match self.random.randrange(8):
            case 0 | 1 | 2:
                clock.learn(other.release(), whole=self.random.random() < 0.5)
            case 3:
                clock.learn(other.release(relaxed=True), relaxed=self.random.random() < 0.5)
            case 4:
                clock.together()
            case 5:
                clock.together_some(self.random.getrandbits(32) | 1)
            case 6:
                clock.fence_proxy(("shared",))
            case _:
                for kind in tuple(clock.streams):
                    clock.complete(kind)

    def agent(self) -> WarpClock | Ticket:
        clock = self.random.choice(self.clocks)
        if self.random.random() < 0.6:
            return clock
        self.tickets.append(Ticket(clock, ALL_LANES, 7, self.random.choice(KINDS)))
        return self.random.choice(self.tickets[-4:])

    def mark(self, by: WarpClock | Ticket, starts: int) -> Mark:
        site, lane = self.random.randrange(1, 40), ALL_LANES
        if isinstance(by, Ticket):
            where = by.position if by.component else (by.own, by.agent.now)
        else:
            where = by.own, by.now
            if starts and self.random.random() < 0.8:
                return Mark(stamp(*where, 0, site), np.sort(self.lanes(starts)))
            lane = self.random.choice((ATOMIC, self.components.lane_sets.code(0xFF), 5))
        return Mark(stamp(*where, lane, site), lane)

    def lanes(self, count: int) -> np.ndarray:
        return np.array(self.random.sample(range(32), count))


def cells_of(rng: random.Random) -> tuple[Any, int]:
    """What makes cells, and how many lanes have their own of them."""
    match rng.randrange(3):
        case 0:
            first, count = rng.randrange(CELLS - 8), rng.randrange(1, 9)
            return lambda: Span(first, count), 0
        case 1:
            pattern, base = (
                Pattern(np.unique([rng.randrange(40) for _ in range(9)])),
                rng.choice((0, 8)),
            )
            return lambda: Cells(pattern, base), 0
    count, size = rng.randrange(1, 9), rng.choice((4, 8))
    starts = np.array([rng.randrange(CELLS // 2 - 2) * 8 for _ in range(count)])
    return lambda: Scattered(starts, size, GRAIN), count


def access(shadow: Shadow, cells: Cells, by: Any, mark: Mark, write: bool) -> list[Any]:
    """The races; none where a routine is sure of that."""
    found: list[Any] = []
    if not shadow.surely(cells, by, mark, write):
        what = shadow.write if write else shadow.read
        what(cells.index(), by, mark, lambda old, cell: found.append((old, cell)))
    return found


@needs_machine_code
@pytest.mark.parametrize("seed", range(6))
def test_routines_say_what_numpy_says(seed: int) -> None:
    warps = Warps(seed)
    rng = warps.random
    ours, plain = (Shadow(CELLS, "shared") for _ in range(2))
    plain._routines = None
    sure = races = 0
    for _ in range(400):
        warps.order()
        make, starts = cells_of(rng)
        by, write = warps.agent(), rng.random() < 0.4
        mark = warps.mark(by, starts)
        written = plain.last[make().index()].all()
        expected = access(plain, make(), by, mark, write)
        assert access(ours, make(), by, mark, write) == expected
        sure += not expected and ours.all_written and bool(written)
        races += bool(expected)
        assert (ours.last == plain.last).all()
        for old, other in zip(ours.reads(slice(None)), plain.reads(slice(None)), strict=True):
            assert (old == other).all()
        assert ours.writers(make()) == plain.writers(make())
        assert sorted(ours.unread(make())) == sorted(plain.unread(make()))
    assert sure > 30
    assert races > 30


@needs_machine_code
def test_a_routine_does_nothing_where_it_is_not_sure() -> None:
    warps = Warps(0)
    first, second = warps.clocks[:2]
    shadow, cells = Shadow(CELLS, "shared"), Span(3, 2)
    read, write = (Mark(stamp(by.own, by.now, 5, 1), 5) for by in (first, second))
    assert not shadow.surely(cells, first, read, False, defined=True), "nobody has written there"
    assert shadow.surely(cells, first, read, False)
    assert not shadow.all_written
    assert not shadow.surely(cells, second, write, True)
    assert not shadow.surely(Span(CELLS - 1, 2), second, write, True), "no such cell"
    shadow.with_barriers()[40] = True
    assert not shadow.surely(Span(40, 1), second, write, True), "an mbarrier"
    assert not shadow.last.any()
    second.learn(first.release())
    assert shadow.surely(cells, second, write, True)
    assert shadow.last.nonzero()[0].tolist() == [3, 4]
    assert not list(shadow.reads(slice(None)))
    assert shadow.surely(cells, second, write, False, defined=True)
    assert shadow.all_written


@needs_machine_code
@pytest.mark.parametrize("seed", range(4))
def test_the_same_of_global_memory(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    warps = Warps(seed)
    rng = warps.random
    ours, plain = (GlobalShadow(GRAIN) for _ in range(2))
    races = sure = 0
    for _ in range(200):
        warps.order()
        make, starts = cells_of(rng)
        by, write = warps.agent(), rng.random() < 0.6
        mark, cluster = warps.mark(by, starts), rng.randrange(8) // 7
        where = np.asarray(make()._starts if starts else [GRAIN * rng.randrange(60)], np.int64)
        found: list[list[Any]] = []
        for shadow, native in ((ours, True), (plain, False)):
            seen: list[Any] = []

            def on_race(*what: Any, seen: list[Any] = seen) -> bool:
                seen.append(what)
                return False

            piece = Piece(where + (5 << 20), 8, cluster, mark)
            with monkeypatch.context() as patched:
                if not native:
                    patched.setattr(frame, "routines", lambda: None)
                (shadow.write if write else shadow.read)(piece, by, on_race)
            found.append(seen)
        assert found[0] == found[1]
        races += bool(found[0])
        sure += not found[0]
        assert (ours.low, ours.high) == (plain.low, plain.high)
        for number, chunk in plain.chunks.items():
            other = ours.chunks[number]
            assert (chunk.last == other.last).all()
            assert (chunk.owner == other.owner).all()
    assert races > 20
    assert sure > 20
