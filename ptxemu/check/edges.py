"""Synchronisation: which instruction tells whom of what. PTX ISA, "Memory Consistency Model" and
the sections named at each method.

`hardware` rules, those that kernels known right on hardware rely on: mbarrier arrivals and waits
order tcgen05 operations without tcgen05.fence; using the registers of a tcgen05.ld completes it;
the scope of a wait is not looked at, that of an arrival is.
"""

from __future__ import annotations

from ptxemu.check.agents import Ticket
from ptxemu.check.clocks import INITIALISED, ORDERED, join

_FENCED_SPACES = ("shared", "global")


class Edges:
    """The part of the checker that moves clocks."""

    machine: object

    # -- mbarrier -----------------------------------------------------------------------------

    def arrival(self, w: object, cta: object, barrier: object, how: str) -> None:
        """mbarrier.arrive: a release ("mbarrier.arrive"). Where no scope is named the manual's is
        .cta; CUTLASS's ClusterBarrier::arrive relies on more at the barrier of a peer."""
        self._used(w, cta, barrier)
        too_narrow = cta is not w.cta and "cta" in how
        if cta is not w.cta:
            self.reached(cta, w.clock.own, w.clock.now, w.at)
        relaxed = "relaxed" in how or too_narrow
        barrier.clock_of.arrive(w.clock.release(relaxed=relaxed))

    def arrival_of(self, ticket: Ticket, cta: object, barrier: object) -> None:
        """tcgen05.commit, cp.async.mbarrier.arrive: an arrival by operations that completed."""
        if cta is not ticket.agent.cta:
            self.reached(cta, ticket.component, ticket.step, ticket.site)
        barrier.clock_of.arrive(ticket.told())

    def waited(self, w: object, cta: object, barrier: object, parity: int) -> None:
        """A wait that was successful: an acquire ("mbarrier.test_wait / try_wait")."""
        self._used(w, cta, barrier)
        barrier.clock_of.wait(w.clock, parity)

    def _used(self, w: object, cta: object, barrier: object) -> None:
        """An mbarrier is used after its mbarrier.init, and by peers and the async proxy after
        fence.mbarrier_init or a release ("mbarrier.init", "membar / fence")."""
        phases = barrier.clock_of
        if phases.component in w.clock.waited:
            return
        w.clock.waited.add(phases.component)
        component, step = phases.initialised
        rows = w.clock.rows
        if component < rows.shape[1]:
            if max(rows[ORDERED, component], rows[INITIALISED, component]) >= step:
                return
        self.unseen_init(w, phases)

    # -- barriers -----------------------------------------------------------------------------

    def barrier_arrival(self, w: object, barrier: object) -> None:
        """bar.sync, bar.arrive, bar.red: a release to all that wait ("bar / barrier")."""
        told = w.clock.release()
        barrier.told = told if barrier.told is None else join(barrier.told, told)

    def barrier_complete(self, barrier: object, waiters: list) -> None:
        told, barrier.told = barrier.told, None
        for warp, fragment in waiters:
            warp.clock.learn(told)
            if fragment.mask == warp.live:
                warp.clock.together()

    def cluster_arrival(self, w: object, relaxed: bool) -> None:
        """barrier.cluster.arrive: .release is the default ("barrier.cluster")."""
        told = w.clock.release(relaxed=relaxed)
        cluster = w.cluster
        cluster.told = told if cluster.told is None else join(cluster.told, told)

    def cluster_complete(self, cluster: object) -> None:
        cluster.phases.append(cluster.told)
        cluster.told = None

    def cluster_waited(self, w: object) -> None:
        phase = w.cluster_phase
        if 0 < phase <= len(w.cluster.phases) and w.cluster.phases[phase - 1] is not None:
            w.clock.learn(w.cluster.phases[phase - 1])

    def warp_sync(self, w: object) -> None:
        """bar.warp.sync orders memory between its lanes ("bar.warp.sync")."""
        w.clock.together()

    # -- groups of bulk copies ----------------------------------------------------------------

    def bulk_committed(self, w: object) -> None:
        """cp.async.bulk.commit_group."""
        w.clock.commit("bulk read")

    def bulk_waited(self, w: object, allowed: int, read: bool) -> None:
        """cp.async.bulk.wait_group: the sources of older groups have been read."""
        w.clock.wait_groups("bulk read", allowed)

    # -- fences -------------------------------------------------------------------------------

    def fence(self, w: object) -> None:
        w.clock.fence()

    def fence_proxy(self, w: object, spaces: tuple[str, ...] = _FENCED_SPACES) -> None:
        w.clock.fence_proxy(spaces)

    def fence_init(self, w: object) -> None:
        w.clock.fence_init()
