"""Beginnings and ends: mbarriers, tensor memory, and CTAs that exit while others still reach them.

What the machine itself refuses (arrivals beyond the pending count, transaction counts out of range,
a barrier reused with another count, tcgen05.alloc after relinquish) stays an error there.
"""

from __future__ import annotations

from ptxemu.check.agents import PhaseClock
from ptxemu.check.clocks import EXECUTED, join
from ptxemu.report import NOTE, Access, Finding, place_of


class Lifetime:
    """The part of the checker that follows objects from their beginning to their end."""

    machine: object
    sites: list

    # -- mbarriers ----------------------------------------------------------------------------

    def unseen_init(self, by: str, site: int, phases: PhaseClock) -> None:
        """An mbarrier is used, at `site`, without being ordered after its mbarrier.init."""
        init = Access(
            phases.agent,
            "mbarrier.init",
            "init",
            "shared memory",
            **place_of(self.sites[phases.init_site]),
        )
        use = Access(by, "", "use", "shared memory", **place_of(self.sites[site]))
        self._lifetime(
            "mbarrier",
            f"{phases.agent} is used by what is not ordered after its initialisation",
            site,
            accesses=(init, use),
            missing="a barrier behind mbarrier.init; towards a peer or the async proxy, "
            "fence.mbarrier_init before it",
            rule="mbarrier.init; membar / fence",
        )

    def initialised_again(self, w: object, barrier: object) -> None:
        """mbarrier.init over one whose phase is under way."""
        if barrier.tx or barrier.pending != barrier.expected:
            self._lifetime(
                "mbarrier",
                f"{barrier.describe()} is initialised again in the middle of its phase",
                w.at,
                rule="mbarrier.init",
            )

    def counted(self, w: object, barrier: object, lanes: int, arrivals: int) -> None:
        """The arrivals of one instruction should belong to one phase: where the count of the
        mbarrier is too small the surplus drifts, until a phase ends without a whole warp."""
        if lanes > 1 and arrivals > barrier.pending:
            self._lifetime(
                "mbarrier",
                f"{arrivals} arrivals of one instruction, {barrier.pending} of {barrier.expected} "
                "pending: some count in the next phase",
                w.at,
                missing="a count of mbarrier.init that all arrivals of a phase add up to",
                rule="mbarrier.init, phase of the mbarrier object",
            )

    def barrier_reused(self, w: object, barrier: object) -> None:
        """A warp arrives at a named barrier without knowing that the phase before is complete: in
        another schedule it counts in that one, and others go on without those they wait for."""
        self._lifetime(
            "barrier",
            f"{w.label} may arrive at barrier {barrier.ident} while other warps still meet there",
            w.at,
            missing="a barrier id of its own, or an order behind the phase before",
            rule="bar, barrier",
        )

    # -- allocations of global memory ---------------------------------------------------------

    def outside(self, message: str) -> None:
        """An access to memory of the process that nobody has allocated for the kernel."""
        instr = self.machine.program.running_instruction()
        key = ("out-of-bounds", instr and instr.line)
        if key in self._known:
            return
        self._known.add(key)
        place = {} if instr is None else place_of(instr)
        self.machine.report(
            Finding("out-of-bounds", message, rule="ld, st: the address is allocated", **place)
        )

    # -- the end of a CTA ---------------------------------------------------------------------

    def reached(self, cta: object, component: int, step: int, site: int) -> None:
        """An operation of a peer, or a load, that will have touched `cta` when `component` has come
        to `step`.

        Commits and stores of the CTA itself may be under way at its exit: the last commit of
        NVIDIA's fmha.py is waited for by nobody, nor are the last bulk stores of its
        tutorial_tma."""
        known = cta.reached_until.get(component)
        if known is None or known[0] < step:
            cta.reached_until[component] = (step, site)
        if cta.ended:
            self._reached_at_end(cta, component, step, site)

    def warp_ended(self, w: object) -> None:
        """What the warps of a CTA know at their end, together."""
        self.copies_at_exit(w)
        cta = w.cta
        known = cta.known_at_end
        cta.known_at_end = w.clock.rows.copy() if known is None else join(known, w.clock.rows)

    def cta_ended(self, cta: object) -> None:
        """All threads have exited: nothing may reach the CTA any more, and nothing may be left."""
        cta.ended = True
        for component, (step, site) in cta.reached_until.items():
            self._reached_at_end(cta, component, step, site)
        for base, columns in cta.tmem.allocations.items():
            self._lifetime(
                "tmem",
                f"{columns} columns at {base:#x} of tensor memory are not deallocated at exit",
                0,
                missing="tcgen05.dealloc",
                rule="tcgen05.alloc, dealloc",
            )
        for barrier in cta.mbarriers.values():
            if barrier.tx < 0:  # more may be expected: FlashAttention-4's last producer_acquire
                self._lifetime(
                    "mbarrier",
                    f"{barrier.describe()} at exit: more bytes have landed than were expected",
                    barrier.clock_of.init_site,
                    rule="mbarrier, complete-tx",
                )
            elif self.strict and 0 < barrier.pending < barrier.expected:
                # A note: FlashAttention-4 leaves two of its barriers so, half of 256 have arrived.
                self._lifetime(
                    "mbarrier",
                    f"{barrier.describe()} at exit: some of its arrivals are missing",
                    barrier.clock_of.init_site,
                    severity=NOTE,
                    missing="an arrival, or a smaller count of mbarrier.init",
                    rule="phase of the mbarrier object",
                )

    def _reached_at_end(self, cta: object, component: int, step: int, site: int) -> None:
        rows = cta.known_at_end
        if component >= rows.shape[1] or rows[EXECUTED, component] < step:
            self._still_reached(cta, component, site)

    def _still_reached(self, cta: object, component: int, site: int) -> None:
        kind = cta.cluster.components.known[component]
        self._lifetime(
            "exited",
            f"a CTA may exit before an operation that reaches it has completed ({kind.kind})",
            site,
            missing="a wait for it, or a cluster barrier before the exit",
            rule="CUDA C++ Programming Guide, Distributed Shared Memory",
        )

    # -- findings -----------------------------------------------------------------------------

    def _lifetime(self, check: str, message: str, site: int, **more: object) -> None:
        key = (check, site, message if not site else "")
        if key not in self._known:
            self._known.add(key)
            self.machine.report(Finding(check, message, **place_of(self.sites[site]), **more))
