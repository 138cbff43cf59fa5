"""What a run of the kernel shows and its text does not: signals that nobody waits for, waits that
tell nothing new, and those behind which a warp does nothing more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from ptxemu import Options
from ptxemu.check.agents import PhaseClock, WarpClock
from ptxemu.check.checker import Checker
from ptxemu.check.clocks import fresh, join
from ptxemu.machine.mbarrier import MBarrier
from workbench.mutation.text import Observed

# Of the checker: what it is told when a warp writes, signals, or issues asynchronous work.
_ACTS = ("shared", "arrival", "barrier_arrival", "cluster_arrival", "ticket")


class _Observer:
    def __init__(self) -> None:
        self.arrivals: list[tuple[int, MBarrier, int]] = []
        self.heard: dict[MBarrier, int] = {}  # mbarrier -> the last phase that a thread waits for
        self.waits: set[int] = set()  # lines of all waits,
        self.telling: set[int] = set()  # and of those that tell their warp something
        self.bulk: set[int] = set()  # lines of wait_group and commit_group,
        self.followed: set[int] = set()  # and of those behind which their warp acts
        self.open: dict[object, set[int]] = {}  # warp -> those that it has executed

    def arrival(self, checker: Checker, w: Any, cta: object, barrier: MBarrier, *_: object) -> None:
        self.arrivals.append((checker.sites[w.at].line, barrier, barrier.phase))

    def arrival_of(self, checker: Checker, ticket: Any, cta: object, barrier: MBarrier) -> None:
        self.arrivals.append((checker.sites[ticket.site].line, barrier, barrier.phase))

    def waited(
        self, checker: Checker, w: Any, cta: object, barrier: MBarrier, parity: int, *_: object
    ) -> None:
        line = checker.sites[w.at].line
        self.waits.add(line)
        if _tells(w.clock, barrier.clock_of, parity):
            self.telling.add(line)
        done = barrier.phase - 1
        phase = done if done & 1 == parity else done - 1
        self.heard[barrier] = max(self.heard.get(barrier, -1), phase)

    def bulk_waited(self, checker: Checker, w: Any, *_: object) -> None:
        line = checker.sites[w.at].line
        self.bulk.add(line)
        self.open.setdefault(w, set()).add(line)

    bulk_committed = bulk_waited

    def acts(self, w: object) -> None:
        self.followed |= self.open.pop(w, set())

    def observed(self) -> Observed:
        heard = {line for line, at, phase in self.arrivals if phase <= self.heard.get(at, -1)}
        unheard = {line for line, _, _ in self.arrivals} - heard
        return Observed(
            frozenset(unheard),
            frozenset(self.bulk - self.followed),
            frozenset(self.waits - self.telling),
        )


def _tells(clock: WarpClock, phases: PhaseClock, parity: int) -> bool:
    """Whether a wait tells more than that the phase is complete."""
    told = phases.told(clock, parity)
    if told is None:
        return False
    known = join(fresh(clock.components), clock.rows)
    new = told > known[:, : told.shape[1]]
    if not any(phases.with_bytes):
        new[:, phases.component] = False
    return bool(new.any())


def observe(run: Callable[[Options], object]) -> Observed:
    """`run` launches the kernel."""
    observer = _Observer()
    with ExitStack() as patches:
        for name in ("arrival", "arrival_of", "waited", "bulk_waited", "bulk_committed"):
            patches.enter_context(_told(name, getattr(observer, name)))
        for name in _ACTS:
            patches.enter_context(_told(name, lambda _, w, *args: observer.acts(w)))
        run(Options(check=True))
    return observer.observed()


@contextmanager
def _told(name: str, also: Callable) -> Iterator[None]:
    """Whoever tells the checker tells `also` first."""
    method = getattr(Checker, name)

    def both(*arguments: object, **options: object) -> object:
        also(*arguments)
        return method(*arguments, **options)

    with mock.patch.object(Checker, name, both):
        yield
