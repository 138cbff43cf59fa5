"""Facts that a run of the kernel shows and its text does not.

They are signals that nobody waits for, waits that order nothing new, and waits after which a warp
does nothing more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

from ptxemu import Options
from ptxemu.check.agents import WarpClock
from ptxemu.check.checker import Checker
from ptxemu.check.clocks import fresh, join
from ptxemu.check.state import PhaseClock
from ptxemu.machine.async_ops import Work
from ptxemu.machine.mbarrier import MBarrier
from ptxemu.machine.state import Cta, Warp
from ptxemu.mutation.text import Observed

# Of the checker: what it hears when a warp accesses memory, signals, or issues asynchronous work.
_ACTS = ("shared_access", "mbarrier_arrival", "barrier_arrival", "cluster_arrival", "issued")
_HEARD = (
    "mbarrier_initialised mbarrier_arrival commit_arrival copies_arrival mbarrier_waited"
    " mbarrier_tested copies_waited bulk_waited bulk_committed warp_ended"
).split()


class _Observer:
    def __init__(self) -> None:
        self.arrivals: list[tuple[int, MBarrier, int]] = []
        self.inits: list[tuple[int, MBarrier]] = []
        self.heard: dict[MBarrier, int] = {}  # mbarrier -> the last phase that a thread waits for
        self.waits: set[int] = set()  # lines of all waits,
        self.telling: set[int] = set()  # and of those that tell their warp something
        self.bulk: set[int] = set()  # lines of wait_group and commit_group,
        self.followed: set[int] = set()  # and of those behind which their warp acts
        self.open: dict[Warp, set[int]] = {}  # warp -> those that it has executed
        self.executed: set[int] = set()  # lines of all instructions

    def warp_ended(self, _: Checker, w: Warp) -> None:
        for block, times in zip(w.program.blocks, w.counts, strict=True):
            self.executed.update(step.instr.line for step in block.steps if times)

    def mbarrier_initialised(self, checker: Checker, w: Warp, cta: Cta, barrier: MBarrier) -> None:
        self.inits.append((_line(checker, w), barrier))

    def mbarrier_arrival(
        self, checker: Checker, w: Warp, cta: Cta, barrier: MBarrier, *_: object
    ) -> None:
        self.arrivals.append((_line(checker, w), barrier, barrier.phase))

    def commit_arrival(self, checker: Checker, work: Work, cta: Cta, barrier: MBarrier) -> None:
        site = checker.states.tickets[work].site
        self.arrivals.append((checker.program.sites[site].line, barrier, barrier.phase))

    copies_arrival = commit_arrival

    def mbarrier_waited(
        self, checker: Checker, w: Warp, cta: Cta, barrier: MBarrier, parity: int, *_: object
    ) -> None:
        line = _line(checker, w)
        self.waits.add(line)
        if _tells(checker.states.clocks[w], checker.states.phases[barrier], parity):
            self.telling.add(line)
        done = barrier.phase - 1
        phase = done if done & 1 == parity else done - 1
        self.heard[barrier] = max(self.heard.get(barrier, -1), phase)

    mbarrier_tested = mbarrier_waited

    def copies_waited(self, checker: Checker, w: Warp, allowed: int | None) -> None:
        line, clock = _line(checker, w), checker.states.clocks[w]
        self.waits.add(line)
        done = 0
        if allowed is None:
            done = clock.issued.get("cp.async", 0)
        elif len(groups := clock.groups.get("cp.async", [])) > allowed:
            done = groups[len(groups) - allowed - 1]
        if done and not clock.knows(clock.copied, done):
            self.telling.add(line)

    def bulk_waited(self, checker: Checker, w: Warp, allowed: int, read: bool) -> None:
        line, clock = _line(checker, w), checker.states.clocks[w]
        self.waits.add(line)
        for kind in ("bulk read",) if read else ("bulk read", "bulk write"):
            groups = clock.groups.get(kind, [])
            done = groups[len(groups) - allowed - 1] if len(groups) > allowed else 0
            if done and not clock.knows(clock.streams[kind], done):
                self.telling.add(line)
        self.bulk_committed(checker, w)

    def bulk_committed(self, checker: Checker, w: Warp) -> None:
        line = _line(checker, w)
        self.bulk.add(line)
        self.open.setdefault(w, set()).add(line)

    def acts(self, w: Warp) -> None:
        self.followed |= self.open.pop(w, set())

    def observed(self) -> Observed:
        heard = {line for line, at, phase in self.arrivals if phase <= self.heard.get(at, -1)}
        unheard = {line for line, _, _ in self.arrivals} - heard
        waited = {line for line, at in self.inits if self.heard.get(at, -1) >= 0}
        unheard |= {line for line, _ in self.inits} - waited
        return Observed(
            frozenset(unheard),
            frozenset(self.bulk - self.followed),
            frozenset(self.waits - self.telling),
            frozenset(self.executed),
        )


def _line(checker: Checker, w: Warp) -> int:
    return checker.program.sites[w.at].line


def _tells(clock: WarpClock, phases: PhaseClock, parity: int) -> bool:
    """Whether a wait gives more knowledge than that the phase is complete."""
    phase = phases.told(clock, parity)
    if phase is None:
        return False
    told = phases.phases[phase]
    known = join(fresh(clock.components), clock.rows)
    new = told > known[:, : told.shape[1]]
    if not any(phases.with_bytes):
        new[:, phases.component] = False
    return bool(new.any())


def observe(run: Callable[[Options], object]) -> Observed:
    """`run` launches the kernel."""
    observer = _Observer()
    begin = Checker.__init__

    def begun(checker: Checker, *arguments: Any, **options: Any) -> None:
        begin(checker, *arguments, **options)
        checker.immediate = False  # so that it hears of each operation by the events above
        for name in _HEARD:
            _tell(checker, name, getattr(observer, name))
        for name in _ACTS:
            _tell(checker, name, lambda _, w, *rest: observer.acts(w))

    with mock.patch.object(Checker, "__init__", begun):
        run(Options(check=True))
    return observer.observed()


def _tell(checker: Checker, name: str, also: Callable[..., None]) -> None:
    """Call `also` before each call of the checker's method `name`."""
    hears = getattr(checker, name)

    def both(*arguments: object, **options: object) -> object:
        also(checker, *arguments)
        return hears(*arguments, **options)

    setattr(checker, name, both)
