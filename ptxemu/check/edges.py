"""Synchronisation: which instruction tells whom of what. PTX ISA, "Memory Consistency Model" and
the sections named at each method.

`hardware` rules, those that kernels known right on hardware rely on: mbarrier arrivals and waits
order tcgen05 operations without tcgen05.fence; using the registers of a tcgen05.ld completes it;
the scope of a wait is not looked at, that of an arrival is.
"""

from __future__ import annotations

import numpy as np

from ptxemu.check.agents import Ticket, foreign_told
from ptxemu.check.clocks import (
    ASYNC_GLOBAL,
    ASYNC_SHARED,
    EXECUTED,
    INITIALISED,
    ORDERED,
    fresh,
    join,
)

_FENCED_SPACES = ("shared", "global")


class Edges:
    """The part of the checker that moves clocks."""

    machine: object

    # -- mbarrier -----------------------------------------------------------------------------

    def arrival(self, w: object, cta: object, barrier: object, how: tuple[str, ...]) -> None:
        """mbarrier.arrive: a release ("mbarrier.arrive"). Where no scope is named the manual's is
        .cta; CUTLASS's ClusterBarrier::arrive relies on more at the barrier of a peer."""
        self._used(w, cta, barrier)
        self.told_others(w)
        self.scope_of_arrival(w, cta, how)
        barrier.clock_of.from_peers |= cta is not w.cta
        too_narrow = cta is not w.cta and "cta" in how
        if cta is not w.cta:
            self.reached(cta, w.clock.own, w.clock.now, w.at)
        relaxed = "relaxed" in how or too_narrow
        barrier.clock_of.arrive(w.clock.release(relaxed=relaxed, near=cta is w.cta))

    def arrival_of(self, ticket: Ticket, cta: object, barrier: object) -> None:
        """tcgen05.commit: an arrival by operations that completed.

        It comes right behind the operation before it: of commits to a peer, one after the other,
        FlashAttention-4's backward pass waits for the first only."""
        if cta is not ticket.agent.cta:
            before, commits = ticket.step - 1, ticket.agent.commits
            while before in commits:
                before -= 1
            commits.add(ticket.step)
            self.reached(cta, ticket.component, before, ticket.site)
            self.reached(cta, ticket.own, int(ticket.rows[EXECUTED, ticket.own]), ticket.site)
        self.signalled(ticket, barrier)

    def copies_arrival(self, ticket: Ticket, cta: object, barrier: object, told: object) -> None:
        """cp.async.mbarrier.arrive: what its thread did before (`told`) is published with the
        copies. NVIDIA's fmha_bwd.py fills rows beyond the end with ordinary stores before it."""
        self.arrival_of(ticket, cta, barrier)
        barrier.clock_of.arrive(told)

    def signalled(self, ticket: Ticket, barrier: object) -> None:
        """An arrival, or bytes, in the async proxy, to which mbarrier.init is visible by
        fence.mbarrier_init or fence.proxy.async ("mbarrier.init", "membar / fence")."""
        phases = barrier.clock_of
        if phases.component not in ticket.agent.signalled:
            ticket.agent.signalled.add(phases.component)
            component, step = phases.initialised
            visible = ASYNC_SHARED if ticket.asynchronous else ORDERED
            seen = ticket.rows[(INITIALISED, visible), :]
            if component >= seen.shape[1] or seen[:, component].max() < step:
                self.unseen_init(ticket.agent.agent, ticket.site, phases)
        phases.arrive(ticket.told())
        phases.landing |= not ticket.component

    def waited(
        self, w: object, cta: object, barrier: object, parity: int, how: tuple[str, ...]
    ) -> None:
        """A wait that was successful: an acquire ("mbarrier.test_wait / try_wait")."""
        self._used(w, cta, barrier)
        self.heard_others(w)
        self.scope_of_wait(w, barrier, how)
        told = barrier.clock_of.told(w.clock, parity)
        if told is not None:
            w.clock.learn(told, whole=w.frag.mask == w.live, relaxed="relaxed" in how)

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
        self.unseen_init(w.label, w.at, phases)

    # -- barriers -----------------------------------------------------------------------------

    def barrier_arrival(self, w: object, barrier: object) -> None:
        """bar.sync, bar.arrive, bar.red: a release to all that wait ("bar / barrier")."""
        self.told_others(w)
        if barrier.phases and not w.clock.knows(barrier.component, barrier.phases):
            self.barrier_reused(w, barrier)
        told = w.clock.release()
        barrier.told = told if barrier.told is None else join(barrier.told, told)

    def barrier_complete(self, barrier: object, waiters: list) -> None:
        """Its phases are steps of a component, which whoever waits knows."""
        components = barrier.cta.cluster.components
        if not barrier.phases:
            barrier.component = components.add("named barrier", barrier.cta.name())
        barrier.phases += 1
        told, barrier.told = join(barrier.told, fresh(components)), None
        told[EXECUTED, barrier.component] = barrier.phases
        for warp, fragment in waiters:
            self.heard_others(warp)
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
            w.clock.learn(w.cluster.phases[phase - 1], whole=w.frag.mask == w.live)

    def warp_sync(self, w: object) -> None:
        """bar.warp.sync orders memory between its lanes ("bar.warp.sync")."""
        w.clock.together()

    # -- groups of bulk copies ----------------------------------------------------------------

    def bulk_committed(self, w: object) -> None:
        """cp.async.bulk.commit_group. A store reads its source and writes its target: two streams
        of the same steps."""
        w.clock.stream("bulk write")
        w.clock.issued["bulk write"] = w.clock.issued.get("bulk read", 0)
        w.clock.commit("bulk read", "bulk write")

    def bulk_waited(self, w: object, allowed: int, read: bool) -> None:
        """cp.async.bulk.wait_group: the sources of older groups have been read."""
        w.clock.wait_groups("bulk read", allowed)
        if not read:
            w.clock.wait_groups("bulk write", allowed)

    # -- flags in memory ----------------------------------------------------------------------

    def strong(self, w: object, address: object, how: str, write: bool) -> None:
        """ld.acquire, st.release, atom, red, volatile ("Release and Acquire Patterns"). `how` names
        the semantics, and the scope if it is the CTA; a relaxed access, or one of a scope that does
        not hold both sides, counts with a fence beside it."""
        near, adds = how.endswith(" cta"), "atomic" in how
        if write:
            releases = "release" in how or "acq_rel" in how
            told = self._flag_told(w, relaxed=not releases, near=True)
            self.flags.release((address, w.cta), told, adds=adds)
            if near or not releases:
                told = self._flag_told(w, relaxed=True, near=False)
            self.flags.release(address, told, adds=adds)
        else:
            acquires = "acquire" in how or "acq_rel" in how
            self._learn_all(w, self.flags.acquire((address, w.cta)), relaxed=not acquires)
            self._learn_all(w, self.flags.acquire(address), relaxed=not acquires or near)

    def _flag_told(self, w: object, *, relaxed: bool, near: bool) -> dict[int, np.ndarray]:
        """By cluster."""
        told = foreign_told(w.clock)
        own = told[w.cluster.index] = w.clock.release(relaxed=relaxed, near=near)
        asynchronous = w.clock.components.asynchronous[: own.shape[1]]
        np.copyto(own[ASYNC_GLOBAL], own[ORDERED], where=asynchronous)
        return told

    def _learn_all(self, w: object, told: dict[int, np.ndarray], *, relaxed: bool) -> None:
        for cluster, rows in told.items():
            if cluster == w.cluster.index:
                w.clock.learn(rows, relaxed=relaxed)
            else:
                w.clock.learn_foreign(cluster, rows, relaxed=relaxed)

    def grid_waited(self, w: object) -> None:
        """griddepcontrol.wait: the grids before have completed, their memory is seen."""
        w.clock.know(w.cluster.grid_before, 1)

    # -- fences -------------------------------------------------------------------------------

    def fence(self, w: object, near: bool) -> None:
        """fence, membar; `near`: of scope .cta ("membar / fence")."""
        w.clock.fence(near=near)

    def fence_proxy(self, w: object, spaces: tuple[str, ...] = _FENCED_SPACES) -> None:
        w.clock.fence_proxy(spaces)

    def fence_init(self, w: object) -> None:
        w.clock.fence_init()
