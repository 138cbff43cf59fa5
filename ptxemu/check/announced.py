"""Announcements of bytes (expect_tx) that arrivals may overtake.

A phase of an mbarrier completes when no arrival is pending and no announced byte is missing. So an
announcement has to come before the last arrival of its phase: an arrival of the phase comes after
it, such as that of arrive.expect_tx, or bytes announced before it are still missing. Otherwise all
arrivals may come first; then the phase completes without the bytes, and the announcement counts in
the next one. An arrival that a warp leaves to cp.async (cp.async.mbarrier.arrive) is asynchronous:
it is ordered after copies, not after what else its warp did before.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from ptxemu.check.clocks import EXECUTED
from ptxemu.check.findings import Findings
from ptxemu.check.state import States
from ptxemu.findings import Access, place_of
from ptxemu.machine.mbarrier import MBarrier
from ptxemu.machine.state import Warp


@dataclass(slots=True)
class Announcement:
    """An expect_tx, in step `step` of component `own`. ordered: the phase cannot complete first."""

    agent: str
    own: int
    step: int
    site: int
    nbytes: int
    ordered: bool

    def known_to(self, rows: np.ndarray) -> bool:
        """Whether it comes before what has this clock."""
        return self.own < rows.shape[1] and bool(rows[EXECUTED, self.own] >= self.step)


class Announcements:
    """Announcements in the current phase of each mbarrier."""

    def __init__(self, states: States, findings: Findings) -> None:
        self._states = states
        self._findings = findings
        self._now: defaultdict[MBarrier, list[Announcement]] = defaultdict(list)

    def expected(self, w: Warp, barrier: MBarrier, nbytes: int) -> None:
        """Record expect_tx. What its warp issued before, such as an asynchronous arrival, does not
        come after it, so a lone one is in a step of its own."""
        clock, earlier = self._states.clocks[w], self._now[barrier]
        ordered = "arrive" in self._findings.sites[w.at].opcode
        ordered = ordered or any(each.known_to(clock.rows) for each in earlier)
        if not ordered:
            clock.advance()
        earlier.append(Announcement(w.label, clock.own, clock.now, w.at, nbytes, ordered))

    def arrived(self, barrier: MBarrier, rows: np.ndarray, unordered: int = -1) -> None:
        """Record an arrival by what has this clock. unordered: component whose announcements it may
        overtake."""
        for each in self._now.get(barrier, ()):
            known = each.own != unordered and each.known_to(rows)
            each.ordered = each.ordered or known

    def completed(self, barrier: MBarrier) -> None:
        """Report announcements that the phase does not need in another schedule."""
        for each in self._now.pop(barrier, ()):
            if not each.ordered:
                self._report(barrier, each)

    def _report(self, barrier: MBarrier, found: Announcement) -> None:
        agent = self._states.phases[barrier].agent
        place = place_of(self._findings.sites[found.site])
        self._findings.at(
            "mbarrier",
            f"phase {barrier.phase - 1} of {agent} may complete before {found.agent} announces "
            f"{found.nbytes} bytes in it: no arrival comes after that expect_tx",
            found.site,
            accesses=(Access(found.agent, "", "expect_tx", "shared memory", **place),),
            missing="mbarrier.arrive.expect_tx, or an arrival after expect_tx that the count of "
            "mbarrier.init includes",
            rule="mbarrier, expect-tx operation",
        )
