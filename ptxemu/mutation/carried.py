"""Pairs of accesses that an instruction orders, and what orders them in its mutant.

A run under the checker records for each warp at which line it learned what: that its lanes have
synchronised, or that something of another component is ordered. The witness of two conflicting
accesses is the line where the warp of the later one learned of the earlier one. Accesses of one
lane need no witness. Accesses of two clusters have none here (`Carried.abroad`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np

from ptxemu.check import frame, global_memory
from ptxemu.check.agents import Agent, WarpClock
from ptxemu.check.checker import Checker
from ptxemu.check.clocks import ALL_LANES, ORDERED, Mark, Stamp
from ptxemu.check.footprints import Where
from ptxemu.check.shadow import OnRace, Shadow, unordered
from ptxemu.syntax.tree import Instr

_TELLING = ("learn", "know", "together", "together_some", "fence", "fence_tensor")
# Operations that inform a warp, and whose only use is the knowledge they give.
_ORDERING = ("mbarrier.try_wait", "mbarrier.test_wait", "bar.", "barrier.", "cp.async.wait")
_TOLD = "mbarrier.arrive"
_SHOWN = 3  # pairs, of all

UNREACHED = "orders no two accesses of this problem"


@dataclass
class Carried:
    """Pairs of accesses that a run ordered.

    Attributes:
        pairs: (line of the earlier access, of the later one) -> lines that order the two, 0 for
            none.
        abroad: Whether some accesses were compared with those of another cluster.
    """

    pairs: dict[tuple[int, int], set[int]] = field(default_factory=lambda: defaultdict(set))
    abroad: bool = False


def instead(kernel: Carried, mutant: Carried, changed: Instr) -> str:
    """Return what orders in the mutant what the changed instruction orders in the kernel.

    Returns UNREACHED if the changed instruction orders nothing, '' if that is unknown. The effect
    of an arrival shows in the waits: other lines order pairs in the mutant, or none does.
    """
    if kernel.abroad or mutant.abroad:
        return ""
    if changed.opcode.startswith(_ORDERING):
        own = [pair for pair, lines in kernel.pairs.items() if changed.line in lines]
    elif changed.opcode.startswith(_TOLD):
        own = [pair for pair, lines in kernel.pairs.items() if mutant.pairs.get(pair) != lines]
    else:
        return ""
    others = [mutant.pairs.get(pair, {0}) for pair in own]
    if any(0 in lines for lines in others):
        return ""
    told = [
        f"{first} before {second} by {', '.join(map(str, sorted(lines)))}"
        for (first, second), lines in zip(own[:_SHOWN], others, strict=False)
    ]
    more = f"; {len(own) - _SHOWN} pairs more" * (len(own) > _SHOWN)
    return f"lines {'; '.join(told)}{more}" if own else UNREACHED


class _Witnesses:
    """Witnesses of the running launch."""

    def __init__(self) -> None:
        self.found = Carried()
        self._sites: Any = ()
        self._known: dict[WarpClock, list[tuple[int, np.ndarray, int]]] = defaultdict(list)
        self._seen: set[tuple[int, int, WarpClock]] = set()

    def begun(self, checker: Checker) -> None:
        self._sites = checker.program.sites
        self._known.clear()
        self._seen.clear()

    def told(self, clock: WarpClock) -> None:
        line = self._line(clock.warp.at)
        self._known[clock].append((line, clock.rows[ORDERED].copy(), clock.synced))

    def accessed(self, old: np.ndarray, by: Agent | None, lane: int | np.ndarray) -> None:
        """An access of `lane`, where these stamps were."""
        if by is None:
            self.found.abroad = True
            return
        clock, site = (by, by.warp.at) if isinstance(by, WarpClock) else (by.agent, by.site)
        for packed in np.unique(old).tolist():
            key = packed, site, clock
            if packed and key not in self._seen:
                self._seen.add(key)
                stamp = Stamp.of(packed)
                if stamp.component != clock.own or _others(stamp.lane, lane):
                    pair = self._line(stamp.site), self._line(site)
                    self.found.pairs[pair].add(self._witness(clock, stamp))

    def _witness(self, clock: WarpClock, stamp: Stamp) -> int:
        known = self._known[clock]

        def knows(entry: tuple[int, np.ndarray, int]) -> bool:
            _, ordered, synced = entry
            if stamp.component == clock.own:
                return synced > stamp.step
            return stamp.component < len(ordered) and bool(ordered[stamp.component] >= stamp.step)

        place = bisect_left(known, True, key=knows)
        return known[place][0] if place < len(known) else 0

    def _line(self, site: int) -> int:
        return int(self._sites[site].line)


def _others(earlier: int, now: int | np.ndarray) -> bool:
    """Whether some lanes are not the earlier one."""
    return earlier != ALL_LANES and bool(np.any(np.asarray(now) != earlier))


@contextmanager
def witnessed() -> Iterator[Carried]:
    """Within the block it is taken down what orders the accesses of all launches."""
    witnesses = _Witnesses()
    begin, read, write = Checker.__init__, Shadow.read, Shadow.write
    compare = unordered

    def begun(checker: Checker, *arguments: Any, **options: Any) -> None:
        begin(checker, *arguments, **options)
        witnesses.begun(checker)

    def reading(shadow: Shadow, where: Where, by: Agent, mark: Mark, on_race: OnRace) -> None:
        witnesses.accessed(shadow.last[where], by, mark.lane)
        read(shadow, where, by, mark, on_race)

    def writing(shadow: Shadow, where: Where, by: Agent, mark: Mark, on_race: OnRace) -> None:
        for old in (shadow.last[where], *shadow.reads(where)):
            witnesses.accessed(old, by, mark.lane)
        write(shadow, where, by, mark, on_race)

    def comparing(
        old: np.ndarray, seen: np.ndarray, by: Agent | None, lane: int | np.ndarray
    ) -> np.ndarray:
        witnesses.accessed(old, by, lane)
        return compare(old, seen, by, lane)

    def telling(method: Callable[..., None]) -> Callable[..., None]:
        def told(clock: WarpClock, *arguments: Any, **options: Any) -> None:
            method(clock, *arguments, **options)
            witnesses.told(clock)

        return told

    replaced = (
        (WarpClock, {name: telling(getattr(WarpClock, name)) for name in _TELLING}),
        (Checker, {"__init__": begun}),
        (Shadow, {"read": reading, "write": writing}),
        (global_memory, {"unordered": comparing}),
        (frame, {"routines": lambda: None}),  # which would see to most accesses
    )
    with ExitStack() as stack:
        for owner, methods in replaced:
            for name, new in methods.items():
                stack.enter_context(mock.patch.object(owner, name, new))
        yield witnesses.found
