"""mbarrier objects: phase, pending arrivals, transaction count (PTX ISA "mbarrier").

A phase completes when no arrival is pending and the transaction count is zero. The count may be
transiently negative, as data may land before it is expected. Only this module counts arrivals and
bytes. It keeps waiters and signals, so that a deadlock can be explained.
"""

from __future__ import annotations

from typing import Any

from ptxemu.errors import HardwareRefusal
from ptxemu.machine.async_ops import AsyncUnits
from ptxemu.machine.fragment import Waiters

MAX_COUNT = (1 << 20) - 1


class Signal:
    """Effect of one instruction on an mbarrier, on behalf of one warp.

    kind: 'init', 'arrive' (arrivals), 'expect' (bytes announced) or 'land' (bytes that came).
    times: number of executions.
    amount: number of arrivals or bytes in all executions.
    phase: the latest phase; `now_times` and `now_amount` count within it.
    site: number of the instruction, -1 if no instruction did it.
    """

    __slots__ = ("kind", "agent", "site", "times", "amount", "phase", "now_times", "now_amount")

    def __init__(self, kind: str, agent: str, site: int) -> None:
        self.kind, self.agent, self.site = kind, agent, site
        self.times = self.amount = self.phase = self.now_times = self.now_amount = 0


class MBarrier:
    """State of one mbarrier.

    `phase` counts completed phases; its low bit is the parity that waits test.
    """

    __slots__ = (
        *("offset", "owner", "expected", "pending", "tx", "phase", "waiters", "sources"),
        *("listeners", "units", "signals", "seen"),
    )

    def __init__(
        self,
        offset: int,
        owner: str,
        count: int,
        listeners: tuple[Any, ...] = (),
        units: AsyncUnits | None = None,
        site: int = -1,
    ) -> None:
        if not 1 <= count <= MAX_COUNT:
            raise HardwareRefusal(f"mbarrier.init count {count}; must be 1..{MAX_COUNT}")
        self.offset, self.owner = offset, owner
        self.expected = count
        self.pending = count
        self.tx = 0
        self.phase = 0
        self.waiters: Waiters = []
        self.sources: set[str] = set()  # who has ever arrived or landed bytes
        self.listeners = listeners
        self.units = units
        first = Signal("init", "", site)
        first.times = first.now_times = 1
        first.amount = first.now_amount = count
        self.signals: dict[tuple[str, str, int], Signal] = {("init", "", site): first}
        self.seen: dict[str, int] = {}  # warp -> phases completed when it last waited with success

    @property
    def where(self) -> str:
        """Its place, such as "0x400 of cta (0,0,0)"."""
        return f"{self.offset:#x} of {self.owner}"

    def _note(self, kind: str, agent: str, amount: int, times: int, site: int) -> None:
        """Record who signals; for asynchronous work also the instruction that issued it."""
        work = self.units.acting if self.units is not None else None
        if work is not None and work.warp:
            agent, site = work.warp, work.site
        signal = self.signals.get((kind, agent, site))
        if signal is None:
            signal = self.signals[kind, agent, site] = Signal(kind, agent, site)
        if signal.phase != self.phase:
            signal.phase, signal.now_times, signal.now_amount = self.phase, 0, 0
        signal.now_times += times
        signal.now_amount += amount
        signal.times += times
        signal.amount += amount

    def done(self, parity: int) -> bool:
        """try_wait.parity / test_wait.parity: whether the phase with this parity has completed."""
        return (self.phase & 1) != parity

    def arrive(
        self, count: int = 1, *, drop: bool = False, by: str = "", site: int = -1, of: str = ""
    ) -> int:
        """Count arrivals; returns the opaque state of the manual: the phase they belong to, and in
        the upper half what was pending before. site: the instruction, if `by`, or `of`, is a warp;
        of: the warp that issued what `by` did, if no work is running."""
        pending = self.pending
        state = self.phase & 0xFFFFFFFF | pending << 32
        self._note("arrive", of or by, count, 1, site)
        self.sources.add(by)
        for each in self.listeners:
            each.mbarrier_signalled(self)
        if count > pending:
            raise HardwareRefusal(
                f"mbarrier {self.where}: {count} arrivals, {self.pending} pending" + self._full()
            )
        if drop:
            self.expected -= count
        self.pending = pending = pending - count
        if pending == 0 and self.tx == 0:
            self._complete()
        return state

    def _full(self) -> str:
        """Why an arrival is one too many."""
        if self.pending or not self.tx:
            return f"; its count of {self.expected} is less than the arrivals of a phase"
        bytes_ = f"{self.tx} bytes" if self.tx > 0 else f"the announcement of {-self.tx} bytes"
        return (
            f"; phase {self.phase} has all of its {self.expected} and lacks {bytes_}: somebody "
            "arrives for the next phase before this one is complete (a wait is missing), or twice"
        )

    def arrive_each(
        self, lanes: int, count: int = 1, *, drop: bool = False, by: str = "", site: int = -1
    ) -> int:
        """The arrivals of several lanes, one after the other: they may complete a phase midway."""
        if lanes * count <= self.pending:
            return self.arrive(lanes * count, drop=drop, by=by, site=site)
        first = self.arrive(count, drop=drop, by=by, site=site)
        for _ in range(lanes - 1):
            self.arrive(count, drop=drop, by=by, site=site)
        return first

    def expect(self, nbytes: int, lanes: int = 1, *, by: str = "", site: int = -1) -> None:
        """expect_tx of so many lanes."""
        self._note("expect", by, nbytes * lanes, 1, site)
        self.tx += nbytes * lanes
        if not -MAX_COUNT <= self.tx <= MAX_COUNT:
            each = f": {lanes} lanes announced {nbytes} bytes each; elect one if one is to"
            self._check_tx(each * (lanes > 1))

    def complete(
        self, nbytes: int, *, by: str = "TMA", times: int = 1, site: int = -1, of: str = ""
    ) -> None:
        """complete_tx: bytes have landed, so many times; other arguments as for `arrive`."""
        self._note("land", of or by, nbytes * times, times, site)
        self.sources.add(by)
        for each in self.listeners:
            each.mbarrier_signalled(self)
        self.tx -= nbytes * times
        self._check_tx()
        if self.pending == 0 and self.tx == 0:
            self._complete()

    def _check_tx(self, why: str = "") -> None:
        if not -MAX_COUNT <= self.tx <= MAX_COUNT:
            raise HardwareRefusal(
                f"mbarrier {self.where}: transaction count {self.tx} beyond +-{MAX_COUNT}" + why
            )

    def _complete(self) -> None:
        """All arrivals and bytes of the phase are there."""
        self.phase += 1
        self.pending = self.expected
        for each in self.listeners:
            each.mbarrier_completed(self)
        waiters, self.waiters = self.waiters, []
        for warp, fragment in waiters:
            warp.wake(fragment)

    def describe(self) -> str:
        so_far = ", ".join(sorted(self.sources)) or "nobody"
        return (
            f"mbarrier {self.where} in phase {self.phase}: {self.pending} of {self.expected} "
            f"arrivals and {self.tx} bytes outstanding (in all phases so far from: {so_far})"
        )
