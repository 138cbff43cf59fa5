"""Synchronisation: the order that each instruction establishes.

Sources are PTX ISA, "Memory Consistency Model", and the sections named at each method.

`hardware` rules are those that kernels known right on hardware rely on. mbarrier arrivals and waits
order tcgen05 operations without tcgen05.fence. The scope of a wait is ignored, that of an arrival
is not. For the completion of a tcgen05.ld without a wait, see `tensor_loads`.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from ptxemu.check.agents import Ticket, WarpClock, foreign_told
from ptxemu.check.clocks import (
    ASYNC_GLOBAL,
    ASYNC_SHARED,
    EXECUTED,
    INITIALISED,
    ORDERED,
    fresh,
    join,
)
from ptxemu.check.global_memory import Flags
from ptxemu.check.lifetime import Lifetime
from ptxemu.check.manual import Manual
from ptxemu.check.state import PhaseClock, States
from ptxemu.check.tensor_loads import TensorLoads
from ptxemu.machine.fragment import Waiters
from ptxemu.machine.listener import How
from ptxemu.machine.mbarrier import MBarrier
from ptxemu.machine.state import Cluster, Cta, NamedBarrier, Warp


class Edges:
    """Updates the clocks of warps. unheeded: sites of waits that order nothing."""

    def __init__(
        self,
        states: States,
        lifetime: Lifetime,
        manual: Manual,
        loads: TensorLoads,
        unheeded: frozenset[int],
    ) -> None:
        self._states = states
        self._loads = loads
        self._unheeded = unheeded
        self._lifetime = lifetime
        self._manual = manual
        self._flags = Flags()

    def _told_others(self, w: Warp) -> None:
        """A warp is about to signal."""
        self._loads.before_signal(w)
        self._manual.told_others(w)

    # -- mbarrier -----------------------------------------------------------------------------

    def arrival(self, w: Warp, cta: Cta, barrier: MBarrier, how: How) -> None:
        """mbarrier.arrive: a release ("mbarrier.arrive"). Where no scope is named the manual's is
        .cta; CUTLASS's ClusterBarrier::arrive relies on more at the barrier of a peer."""
        clock, phases = self._states.clocks[w], self._states.phases[barrier]
        if phases.component not in clock.waited:
            self._used(w, clock, phases)
        if clock.open_loads:
            self._loads.signals(w)
        self._manual.told_others(w)
        relaxed, far = "relaxed" in how, cta is not w.cta
        if far:
            self._manual.scope_of_arrival(w, cta, how)
            phases.from_peers = True
            self._lifetime.reached(cta, clock.own, clock.now, w.at)
            relaxed = relaxed or "cta" in how
        phases.arrive(clock.release(relaxed=relaxed, near=not far), far=far)

    def arrival_of(self, ticket: Ticket, cta: Cta, barrier: MBarrier) -> None:
        """Publish a tcgen05.commit: an arrival by operations that completed.

        It comes right after the previous operation: of consecutive commits to a peer,
        FlashAttention-4's backward pass waits for the first only. A cp.async.mbarrier.arrive
        publishes its thread's earlier accesses with the copies: NVIDIA's fmha_bwd.py fills rows
        beyond the end with ordinary stores before it.
        """
        if cta is not ticket.agent.cta:
            before, commits = ticket.step - 1, ticket.agent.commits
            while before in commits:
                before -= 1
            commits.add(ticket.step)
            self._lifetime.reached(cta, ticket.component, before, ticket.site)
            told = int(ticket.rows[EXECUTED, ticket.own])
            self._lifetime.reached(cta, ticket.own, told, ticket.site)
        self.signalled(ticket, barrier)
        if ticket.released is not None:
            self._states.phases[barrier].arrive(ticket.released)

    def signalled(self, ticket: Ticket, barrier: MBarrier) -> None:
        """Record an arrival, or bytes, in the async proxy.

        mbarrier.init has to come before it: its release, or fence.mbarrier_init, which is enough
        for a peer with a relaxed barrier ("mbarrier.init", "membar / fence"). By the text it is
        visible to the async proxy after one of the two fences; hardware needs neither, see
        `manual`.
        """
        phases = self._states.phases[barrier]
        if phases.component not in ticket.agent.signalled:
            ticket.agent.signalled.add(phases.component)
            component, step = phases.initialised
            rows = ticket.rows[:, component] if component < ticket.rows.shape[1] else None
            if rows is None or max(rows[ORDERED], rows[INITIALISED]) < step:
                self._lifetime.unseen_init(ticket.agent.agent, ticket.site, phases)
            elif ticket.asynchronous and max(rows[ASYNC_SHARED], rows[INITIALISED]) < step:
                self._manual.unfenced_init(ticket, phases)
        phases.arrive_with(ticket)
        phases.landing |= not ticket.component

    def mbarrier_waited(self, w: Warp, cta: Cta, barrier: MBarrier, parity: int, how: How) -> None:
        """Apply a successful wait: an acquire ("mbarrier.test_wait / try_wait").

        A wait of scope .cta is relaxed for what threads of peers published. Only with .cluster does
        ptxas invalidate the L1 cache after it.
        """
        clock, phases = self._states.clocks[w], self._states.phases[barrier]
        component = phases.component
        if component not in clock.waited:
            self._used(w, clock, phases)
        if self._manual.strict:
            self._manual.heard_others(w)
        if phases.from_peers:
            self._manual.scope_of_wait(w, how)
        clock.looks(component, barrier.phase)
        if w.at in self._unheeded:
            clock.unheeded[component] = w.at
            return
        phase = phases.told(clock, parity)
        clock.phase_waits[component] = (w.at, parity, 0 if phase is None else phase + 1)
        if phase is None:
            return
        told = phases.phases[phase]
        whole, relaxed = w.frag.mask == w.live, "relaxed" in how
        if "cta" in how and phases.from_peers:
            clock.learn(told, relaxed=True)
            told = phases.near(phase)
        clock.learn(told, whole=whole, relaxed=relaxed)

    mbarrier_tested = mbarrier_waited

    def _used(self, w: Warp, clock: WarpClock, phases: PhaseClock) -> None:
        """A warp uses an mbarrier for the first time.

        That is after its mbarrier.init, and for peers and the async proxy after
        fence.mbarrier_init or a release ("mbarrier.init", "membar / fence").
        """
        clock.waited.add(phases.component)
        component, step = phases.initialised
        rows = clock.rows
        if component < rows.shape[1]:
            if max(rows[ORDERED, component], rows[INITIALISED, component]) >= step:
                return
        self._lifetime.unseen_init(w.label, w.at, phases)

    # -- barriers -----------------------------------------------------------------------------

    def barrier_arrival(self, w: Warp, barrier: NamedBarrier) -> None:
        """bar.sync, bar.arrive, bar.red: a release to all that wait ("bar / barrier").

        A barrier also passes on fences: PyTorch's reductions have __threadfence() in every thread,
        then __syncthreads(), and then one thread counts the CTA with a relaxed atomicAdd. By the
        text of the memory model a fence is of its own thread; hardware has performed the stores.
        """
        clock, state = self._states.clocks[w], self._states.barrier(barrier)
        self._told_others(w)
        if state.phases and not clock.knows(state.component, state.phases):
            self._lifetime.barrier_reused(w, barrier)
        state.add(clock.release(fences=True))
        if heard := clock.unfenced(w.cluster.index):
            state.heard.append(heard)

    def barrier_completed(self, barrier: NamedBarrier, waiters: Waiters) -> None:
        """Record a completed phase as a step of a component that all waiters learn.

        What a thread has heard from a relaxed access is known to the others after a fence of their
        own: the other half of the pattern of `barrier_arrival`.
        """
        components, state = self._states.components(barrier.cta), self._states.barrier(barrier)
        if not state.phases:
            state.component = components.add("named barrier", barrier.cta.name())
        state.phases += 1
        told, state.told = fresh(components) if state.told is None else state.told, None
        told = join(told, fresh(components))
        told[EXECUTED, state.component] = state.phases
        heard, state.heard = state.heard, []
        for warp, fragment in waiters:
            self._manual.heard_others(warp)
            clock = self._states.clocks[warp]
            clock.learn(told)
            for each in heard:
                self._learn_all(warp, each, relaxed=True)
            if fragment.mask == warp.live:
                clock.together()

    def cluster_arrival(self, w: Warp, relaxed: bool) -> None:
        """barrier.cluster.arrive: .release is the default ("barrier.cluster")."""
        state = self._states.clusters[w.cluster.index]
        self._told_others(w)
        state.add(self._states.clocks[w].release(relaxed=relaxed))

    def cluster_completed(self, cluster: Cluster) -> None:
        state = self._states.clusters[cluster.index]
        state.phases.append(state.told)
        state.told = None

    def cluster_waited(self, w: Warp) -> None:
        self._manual.heard_others(w)
        phase, phases = w.cluster_phase, self._states.clusters[w.cluster.index].phases
        told = phases[phase - 1] if 0 < phase <= len(phases) else None
        if told is not None:
            self._states.clocks[w].learn(told, whole=w.frag.mask == w.live)

    # -- groups of copies ---------------------------------------------------------------------

    def copies_waited(self, w: Warp, allowed: int | None) -> None:
        """cp.async.wait_group, .wait_all."""
        clock = self._states.clocks[w]
        if allowed is None:
            clock.commit("cp.async")
            clock.wait_groups("cp.async", 0)
        else:
            clock.wait_groups("cp.async", allowed)

    def bulk_committed(self, w: Warp) -> None:
        """cp.async.bulk.commit_group. A store reads and writes: two streams of the same steps."""
        clock = self._states.clocks[w]
        clock.stream("bulk write")
        clock.issued["bulk write"] = clock.issued.get("bulk read", 0)
        clock.commit("bulk read", "bulk write")

    def bulk_waited(self, w: Warp, allowed: int, read: bool) -> None:
        """cp.async.bulk.wait_group: the sources of older groups have been read."""
        clock = self._states.clocks[w]
        clock.wait_groups("bulk read", allowed)
        if not read:
            clock.wait_groups("bulk write", allowed)

    # -- flags in memory ----------------------------------------------------------------------

    def strong(self, w: Warp, address: Hashable, how: str, write: bool) -> None:
        """ld.acquire, st.release, atom, red, volatile ("Release and Acquire Patterns"). `how` names
        the semantics, and the scope if it is the CTA; a relaxed access, or one of a scope that does
        not hold both sides, counts with a fence beside it."""
        near, adds = how.endswith(" cta"), "atomic" in how
        if write:
            releases = "release" in how or "acq_rel" in how
            if releases:
                self._loads.signals(w)
                self._manual.told_others(w)
            told = self._flag_told(w, relaxed=not releases, near=True)
            self._flags.release((address, w.cta), told, adds=adds)
            if near or not releases:
                told = self._flag_told(w, relaxed=True, near=False)
            self._flags.release(address, told, adds=adds)
        else:
            acquires = "acquire" in how or "acq_rel" in how
            if acquires:
                self._manual.heard_others(w)
            self._learn_all(w, self._flags.acquire((address, w.cta)), relaxed=not acquires)
            self._learn_all(w, self._flags.acquire(address), relaxed=not acquires or near)

    def _flag_told(self, w: Warp, *, relaxed: bool, near: bool) -> dict[int, np.ndarray]:
        """Return what a flag publishes, by cluster."""
        clock = self._states.clocks[w]
        told = foreign_told(clock)
        own = told[w.cluster.index] = clock.release(relaxed=relaxed, near=near)
        asynchronous = clock.components.asynchronous[: own.shape[1]]
        np.copyto(own[ASYNC_GLOBAL], own[ORDERED], where=asynchronous)
        return told

    def _learn_all(self, w: Warp, told: dict[int, np.ndarray], *, relaxed: bool) -> None:
        clock = self._states.clocks[w]
        for cluster, rows in told.items():
            if cluster == w.cluster.index:
                clock.learn(rows, relaxed=relaxed)
            else:
                clock.learn_foreign(cluster, rows, relaxed=relaxed)

    def grid_waited(self, w: Warp) -> None:
        """griddepcontrol.wait: the grids before have completed, their memory is seen."""
        grid = self._states.clusters[w.cluster.index].grid_before
        self._states.clocks[w].know(grid, 1)
        self._states.has_waited = True
