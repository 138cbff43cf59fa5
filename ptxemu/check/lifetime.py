"""Beginnings and ends: mbarriers, tensor memory, and CTAs that exit while others still reach them.

What the machine itself refuses (arrivals beyond the pending count, transaction counts out of range,
a barrier reused with another count, tcgen05.alloc after relinquish) stays an error there.
"""

from __future__ import annotations

import numpy as np

from ptxemu.check.clocks import EXECUTED, join
from ptxemu.check.findings import Findings
from ptxemu.check.footprints import Where
from ptxemu.check.state import MBARRIER_BYTES, PhaseClock, States
from ptxemu.findings import NOTE, Access, place_of
from ptxemu.machine.mbarrier import MBarrier
from ptxemu.machine.state import Cta, NamedBarrier, Warp


class Lifetime:
    """Follows objects of the machine from their beginning to their end."""

    def __init__(self, states: States, findings: Findings, strict: bool) -> None:
        self._states = states
        self._findings = findings
        self._strict = strict
        self._allocated: dict[tuple[Cta, int], int] = {}  # columns that begin here, and the site

    def forget(self) -> None:
        """The launch has ended."""
        self._allocated.clear()

    # -- mbarriers ----------------------------------------------------------------------------

    def unseen_init(self, by: str, site: int, phases: PhaseClock) -> None:
        """An mbarrier is used, at `site`, without being ordered after its mbarrier.init."""
        sites = self._findings.sites
        init, use = place_of(sites[phases.init_site]), place_of(sites[site])
        self._findings.at(
            "mbarrier",
            f"{phases.agent} has a use that is not ordered after its initialisation",
            site,
            accesses=(
                Access(phases.agent, "mbarrier.init", "init", "shared memory", **init),
                Access(by, "", "use", "shared memory", **use),
            ),
            missing="a barrier after mbarrier.init; towards a peer a cluster barrier, and "
            "fence.mbarrier_init before it if that is relaxed",
            rule="mbarrier.init; membar / fence",
        )

    def mbarrier_replaced(self, w: Warp, barrier: MBarrier) -> None:
        """Report mbarrier.init on an mbarrier whose phase is incomplete."""
        if barrier.tx or barrier.pending != barrier.expected:
            self._findings.at(
                "mbarrier",
                f"{barrier.describe()} is initialised again in the middle of its phase",
                w.at,
                rule="mbarrier.init",
            )

    def written(self, cta: Cta, where: Where, agent: str, site: int) -> None:
        """Something else than an mbarrier instruction writes cells of shared memory."""
        barriers = self._states.ctas[cta].shared.barriers
        if barriers is None or not barriers[where].any():
            return
        cells = np.arange(where.start, where.stop) if isinstance(where, slice) else where
        offset = int(cells[barriers[cells]].flat[0]) * self._states.grain
        found = [b for at, b in cta.mbarriers.items() if at <= offset < at + MBARRIER_BYTES]
        if not found:  # mbarrier.inval has ended it
            barriers[cells] = False
            return
        name, sites = f"mbarrier {found[0].where}", self._findings.sites
        init, write = sites[self._states.phases[found[0]].init_site], sites[site]
        self._findings.at(
            "mbarrier",
            f"{name} is overwritten",
            site,
            accesses=(
                Access(name, "mbarrier.init", "init", "", **place_of(init)),
                Access(
                    agent, "", "write", f"shared memory of {cta.name()}", offset, offset,
                    **place_of(write),
                ),
            ),
            missing="an index within the array that is meant, or mbarrier.inval before",
            rule="mbarrier object",
        )  # fmt: skip

    def counted(self, site: int, barrier: MBarrier, lanes: int, arrivals: int) -> None:
        """The arrivals of one instruction should belong to one phase: where the count of the
        mbarrier is too small the surplus drifts, until a phase ends without a whole warp."""
        if lanes > 1 and arrivals > barrier.pending:
            self._findings.at(
                "mbarrier",
                f"{arrivals} arrivals of one instruction, {barrier.pending} of {barrier.expected} "
                "pending: some count in the next phase",
                site,
                missing="one lane that arrives (elect_one), or a count of mbarrier.init that all "
                "arrivals of a phase add up to",
                rule="mbarrier.init, phase of the mbarrier object",
            )

    def barrier_reused(self, w: Warp, barrier: NamedBarrier) -> None:
        """Report an arrival at a named barrier whose previous phase is not known to be complete.

        In another schedule the arrival counts in that phase, and other warps proceed without those
        they wait for.
        """
        self._findings.at(
            "barrier",
            f"{w.label} may arrive at barrier {barrier.ident} while other warps still wait there",
            w.at,
            missing="a separate barrier id, or an order after the previous phase",
            rule="bar, barrier",
        )

    # -- tensor memory ------------------------------------------------------------------------

    def allocated(self, w: Warp, column: int) -> None:
        self._allocated[w.cta, column] = w.at

    # -- the end of a CTA ---------------------------------------------------------------------

    def reached(self, cta: Cta, component: int, step: int, site: int) -> None:
        """An operation of a peer, or a load, that will have touched `cta` when `component` has come
        to `step`.

        Commits and stores of the CTA itself may be under way at its exit: the last commit of
        NVIDIA's fmha.py is waited for by nobody, nor are the last bulk stores of its
        tutorial_tma."""
        state = self._states.ctas[cta]
        known = state.reached_until.get(component)
        if known is None or known[0] < step:
            state.reached_until[component] = (step, site)
        if state.ended:
            self._reached_at_end(cta, component, step, site)

    def warp_ended(self, w: Warp) -> None:
        """Merge what the warps of a CTA know at their end."""
        state, rows = self._states.ctas[w.cta], self._states.clocks[w].rows
        known = state.known_at_end
        state.known_at_end = rows.copy() if known is None else join(known, rows)

    def cta_ended(self, cta: Cta) -> None:
        """End a CTA whose threads have exited: nothing may reach it, and nothing may be left."""
        state = self._states.ctas[cta]
        state.ended = True
        for component, (step, site) in state.reached_until.items():
            self._reached_at_end(cta, component, step, site)
        for base, columns in cta.tmem.allocations.items():
            self._findings.at(
                "tmem",
                f"{columns} columns at {base:#x} of tensor memory are not deallocated at exit",
                self._allocated.get((cta, base), 0),
                missing="tcgen05.dealloc of them, after all their uses, by a warp that reaches it",
                rule="tcgen05.alloc, dealloc",
            )
        for barrier in cta.mbarriers.values():
            self._left_over(barrier)

    def _left_over(self, barrier: MBarrier) -> None:
        site = self._states.phases[barrier].init_site
        if barrier.tx < 0:  # more may be expected: FlashAttention-4's last producer_acquire
            self._findings.at(
                "mbarrier",
                f"{barrier.describe()} at exit: more bytes have landed than were expected",
                site,
                rule="mbarrier, complete-tx",
            )
        elif self._strict and 0 < barrier.pending < barrier.expected:
            # A note: FlashAttention-4 leaves two of its barriers so, half of 256 have arrived.
            self._findings.at(
                "mbarrier",
                f"{barrier.describe()} at exit: some of its arrivals are missing",
                site,
                severity=NOTE,
                missing="an arrival, or a smaller count of mbarrier.init",
                rule="phase of the mbarrier object",
            )

    def _reached_at_end(self, cta: Cta, component: int, step: int, site: int) -> None:
        rows = self._states.ctas[cta].known_at_end
        if rows is not None and component < rows.shape[1] and rows[EXECUTED, component] >= step:
            return
        of = self._states.components(cta).known[component]
        message, missing = (
            f"a CTA may exit before an operation that reaches it has completed ({of.kind})",
            "a wait for it (producer_tail of a pipeline), or a cluster barrier before the exit",
        )
        if of.kind == "mbarrier":
            message, missing = (
                f"a CTA may exit while bytes are on their way to it: nobody waits for phase"
                f" {step - 1} of {of.agent}",
                "a wait for it, or one copy less",
            )
        self._findings.at(
            "exited",
            message,
            site,
            missing=missing,
            rule="CUDA C++ Programming Guide, Distributed Shared Memory",
        )
