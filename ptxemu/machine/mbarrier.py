"""mbarrier objects: phase, pending arrivals, transaction count (PTX ISA "mbarrier").

A phase completes when no arrival is pending and the transaction count is zero; the count may be
transiently negative, as data may land before it is expected. Arrivals and bytes are counted here
and nowhere else; who waits is kept so that a deadlock can name it.
"""

from __future__ import annotations

from ptxemu.errors import HardwareRefusal
from ptxemu.machine.listener import Listener, Waiters

MAX_COUNT = (1 << 20) - 1


class MBarrier:
    """One barrier. `phase` counts completed phases; its low bit is the parity that waits test."""

    __slots__ = ("where", "expected", "pending", "tx", "phase", "waiters", "sources", "listeners")

    def __init__(self, where: str, count: int, listeners: tuple[Listener, ...] = ()) -> None:
        if not 1 <= count <= MAX_COUNT:
            raise HardwareRefusal(f"mbarrier.init count {count}; must be 1..{MAX_COUNT}")
        self.where = where
        self.expected = count
        self.pending = count
        self.tx = 0
        self.phase = 0
        self.waiters: Waiters = []
        self.sources: set[str] = set()  # who has ever arrived or landed bytes
        self.listeners = listeners

    def done(self, parity: int) -> bool:
        """try_wait.parity / test_wait.parity: the phase with this parity has completed."""
        return (self.phase & 1) != parity

    def arrive(self, count: int = 1, *, drop: bool = False, by: str = "") -> int:
        """Count arrivals; returns the opaque state of the manual: the phase they belong to, and in
        the upper half what was pending before."""
        state = self.phase & 0xFFFFFFFF | self.pending << 32
        self._signalled(by)
        if count > self.pending:
            raise HardwareRefusal(
                f"mbarrier at {self.where}: {count} arrivals, {self.pending} pending"
            )
        if drop:
            self.expected -= count
        self.pending -= count
        self._complete_if_done()
        return state

    def arrive_each(self, lanes: int, count: int = 1, *, drop: bool = False, by: str = "") -> int:
        """The arrivals of several lanes, one after the other: they may complete a phase midway."""
        if lanes * count <= self.pending:
            return self.arrive(lanes * count, drop=drop, by=by)
        first = self.arrive(count, drop=drop, by=by)
        for _ in range(lanes - 1):
            self.arrive(count, drop=drop, by=by)
        return first

    def expect(self, nbytes: int) -> None:
        self.tx += nbytes
        self._check_tx()

    def complete(self, nbytes: int, *, by: str = "TMA") -> None:
        """complete_tx: bytes have landed."""
        self._signalled(by)
        self.tx -= nbytes
        self._check_tx()
        self._complete_if_done()

    def _signalled(self, by: str) -> None:
        self.sources.add(by)
        for each in self.listeners:
            each.mbarrier_signalled(self)

    def _check_tx(self) -> None:
        if not -MAX_COUNT <= self.tx <= MAX_COUNT:
            raise HardwareRefusal(
                f"mbarrier at {self.where}: transaction count {self.tx} beyond +-{MAX_COUNT}"
            )

    def _complete_if_done(self) -> None:
        if self.pending == 0 and self.tx == 0:
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
