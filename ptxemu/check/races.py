"""Data races: two accesses of one cell, one of them a write, neither ordered after the other.

The order is that of the synchronisation a launch executed, whatever the schedule happened to be: a
wait tells only what it is sure to tell (`PhaseClock.wait`), so one friendly run is enough to see
that an edge is missing. Rules are those that kernels known right on hardware rely on; each edge is
named with its manual section in `edges.py`.
"""

from __future__ import annotations

import numpy as np

from ptxemu.check import explain, footprints
from ptxemu.check.agents import PhaseClock, Ticket, WarpClock
from ptxemu.check.clocks import ALL_LANES, LANE_SHIFT, Components, Stamp, stamp
from ptxemu.check.shadow import Shadow, Where
from ptxemu.report import Access, Finding

Agent = WarpClock | Ticket


class Races:
    """The checker of one launch: shadows of every memory, and what is found."""

    def __init__(self, machine: object) -> None:
        self.machine = machine
        self.sites = machine.program.sites
        self.grain = machine.program.shared_grain
        self._known: set[tuple] = set()

    # -- beginnings ---------------------------------------------------------------------------

    def cluster_started(self, cluster: object) -> None:
        cluster.components = Components()

    def cta_started(self, cta: object) -> None:
        cta.shared_shadow = Shadow(len(cta.smem) // self.grain, "shared")
        cta.tensor_shadow = Shadow(footprints.TENSOR_CELLS, "tensor")
        cta.allocations = None  # the component of its tcgen05.alloc and .dealloc
        cta.allocated = 0  # how many it has executed
        cta.reached_until = {}  # component -> the last step of it that touches this CTA, and site
        cta.known_at_end = None
        cta.ended = False

    def warp_started(self, w: object) -> None:
        w.clock = WarpClock(w.cluster.components, w.label, w.cta)

    def barrier_initialised(self, w: object, cta: object, offset: int, barrier: object) -> None:
        barrier.clock_of = PhaseClock(cta.cluster.components, f"mbarrier {barrier.where}")
        barrier.clock_of.initialised = (w.clock.own, w.clock.now)
        barrier.clock_of.init_site = w.at

    # -- ordinary accesses --------------------------------------------------------------------

    def shared(
        self,
        w: object,
        cta: object,
        starts: int | np.ndarray,
        nbytes: int,
        lanes: np.ndarray | None,
        write: bool,
    ) -> None:
        """`nbytes` at a byte offset that all lanes share, or at one of each of `lanes`."""
        clock = w.clock
        if cta is not w.cta:
            self.reached(cta, clock.own, clock.now, w.at)
        if lanes is None:
            first = starts // self.grain
            where: Where = slice(first, first + max(nbytes // self.grain, 1))
            lane: int | np.ndarray = ALL_LANES
            mark: int | np.ndarray = stamp(clock.own, clock.now, ALL_LANES, w.at)
        else:
            where = footprints.bytes_of(starts.astype(np.int64), nbytes, self.grain)
            lane = np.broadcast_to(lanes.astype(np.int64), where.shape)
            mark = stamp(clock.own, clock.now, 0, w.at) + (lane << LANE_SHIFT)
        self._touch(cta.shared_shadow, cta, where, clock, mark, lane, write)

    # -- asynchronous operations --------------------------------------------------------------

    def ticket(self, w: object, kind: str = "") -> Ticket:
        """For an operation that the active lanes issue now."""
        mask = w.frag.mask
        lane = mask.bit_length() - 1 if mask & (mask - 1) == 0 else ALL_LANES
        return Ticket(w.clock, lane, w.at, kind)

    def shared_async(
        self, ticket: Ticket, cta: object, where: Where, step: tuple[int, int], write: bool
    ) -> None:
        """Cells of shared memory; `step`: the component and its step that tell completion."""
        mark = ticket.mark(*step)
        if cta is not ticket.agent.cta:
            self.reached(cta, *step, ticket.site)
        self._touch(cta.shared_shadow, cta, where, ticket, mark, ticket.lane, write)

    def shared_bytes(self, low: int, nbytes: int) -> slice:
        return slice(low // self.grain, -(-(low + nbytes) // self.grain))

    def landed(
        self, ticket: Ticket, places: list, nbytes: int, signals: list
    ) -> tuple[int, int]:
        """Bytes arrive in shared memory and complete on mbarriers, one for all places or one each:
        the places are known to whoever waits for the phase. Returns the last place's step."""
        step = (0, 0)
        for number, (cta, offset) in enumerate(places):
            phases = signals[min(number, len(signals) - 1)].clock_of
            step = (phases.component, len(phases.phases) + 1)
            self.shared_async(ticket, cta, self.shared_bytes(offset, nbytes), step, True)
        for barrier in signals:
            barrier.clock_of.arrive(ticket.told())
        return step

    def source_read(self, ticket: Ticket, cta: object, low: int, nbytes: int) -> None:
        """A bulk store or reduction reads shared memory."""
        step = (ticket.component, ticket.step)
        self.shared_async(ticket, cta, self.shared_bytes(low, nbytes), step, False)

    def copied(self, ticket: Ticket, cta: object, offsets: np.ndarray, nbytes: int) -> None:
        """cp.async writes shared memory, one piece per lane."""
        where = footprints.bytes_of(offsets, nbytes, self.grain)
        self.shared_async(ticket, cta, where, (ticket.component, ticket.step), True)

    def multiply(
        self, ticket: Ticket, ctas: list, d: int, operands: tuple, instr: object
    ) -> None:
        """tcgen05.mma; operands: A (descriptor or address in tensor memory) and B. D is written,
        and what a write needs is all that reading it would need."""
        a, b = operands
        step = (ticket.component, ticket.step)
        group = len(ctas)
        for cta in ctas:
            b_cells = footprints.operand_cells(
                b, instr.n // group, instr.k, instr.b_format, instr.b_mn_major, self.grain
            )
            self.shared_async(ticket, cta, b_cells, step, False)
            if isinstance(a, int):
                a_cells = footprints.tensor_operand_cells(a, instr)
                self.tensor_async(ticket, cta, a_cells, step, False)
            else:
                a_cells = footprints.operand_cells(
                    a, instr.m // group, instr.k, instr.a_format, instr.a_mn_major, self.grain
                )
                self.shared_async(ticket, cta, a_cells, step, False)
            cells = footprints.accumulator_cells(d, instr, group)
            self.tensor_async(ticket, cta, cells, step, True)

    # -- tensor memory ------------------------------------------------------------------------

    def tensor_async(
        self, ticket: Ticket, cta: object, where: Where, step: tuple[int, int], write: bool
    ) -> None:
        mark = ticket.mark(*step)
        if cta is not ticket.agent.cta:
            self.reached(cta, *step, ticket.site)
        self._touch(cta.tensor_shadow, cta, where, ticket, mark, ALL_LANES, write)

    def moved(self, w: object, address: int, move: tuple, write: bool) -> int:
        """tcgen05.ld or .st; returns its step among those of the warp."""
        kind = "tcgen05.st" if write else "tcgen05.ld"
        component, step = w.clock.issue(kind)
        where = footprints.moved_cells(move, address, w.index % 4)
        mark = stamp(component, step, ALL_LANES, w.at)
        self._touch(w.cta.tensor_shadow, w.cta, where, w.clock, mark, ALL_LANES, write)
        return step

    def columns(self, w: object, column: int, count: int, pair: bool) -> None:
        """tcgen05.alloc and .dealloc: columns begin or end. With .cta_group::2 both CTAs of a pair
        take part, so that either knows of the other's."""
        owner = w.cluster.ctas[w.cta.rank & ~1] if pair else w.cta
        components = w.cluster.components
        if owner.allocations is None:
            owner.allocations = components.add("tcgen05.alloc", owner.name())
        w.cta.allocated += 1
        w.clock.know(owner.allocations, w.cta.allocated)
        mark = stamp(owner.allocations, w.cta.allocated, ALL_LANES, w.at)
        where = footprints.column_cells(column, count)
        self._touch(w.cta.tensor_shadow, w.cta, where, w.clock, mark, ALL_LANES, True)

    # -- findings -----------------------------------------------------------------------------

    def _touch(
        self,
        shadow: Shadow,
        cta: object,
        where: Where,
        by: Agent,
        mark: int | np.ndarray,
        lane: int | np.ndarray,
        write: bool,
    ) -> None:
        def on_race(old: int, cell: int) -> None:
            self._found(shadow, cta, cell, old, by, int(np.asarray(mark).flat[0]), write)

        (shadow.write if write else shadow.read)(where, by, mark, lane, on_race)

    def _found(
        self,
        shadow: Shadow,
        cta: object,
        cell: int,
        old: int,
        by: Agent,
        mark: int,
        write: bool,
    ) -> None:
        earlier, later = Stamp.of(old), Stamp.of(mark)
        key = (shadow.space, earlier.site, later.site, write)
        if key in self._known:
            return
        self._known.add(key)
        known = cta.cluster.components.known
        before = known[earlier.component]
        missing, rule = explain.missing(
            earlier, before, by.rows, own=by.own, asynchronous=isinstance(by, Ticket)
        )
        was_write = int(shadow.last[cell]) == old
        accesses = (
            self._access(shadow, cta, cell, before, earlier, "write" if was_write else "read"),
            self._access(shadow, cta, cell, known[later.component], later,
                         "write" if write else "read"),
        )  # fmt: skip
        instr = self.sites[later.site]
        self.machine.report(
            Finding(
                "race",
                f"{accesses[1].role} is not ordered after {accesses[0].role}",
                line=instr.line,
                text=instr.text,
                source=getattr(instr, "source", ""),
                accesses=accesses,
                missing=missing,
                rule=rule,
            )
        )

    def _access(
        self, shadow: Shadow, cta: object, cell: int, component: object, seen: Stamp, what: str
    ) -> Access:
        instr = self.sites[seen.site]
        if shadow.space == "tensor":
            first = last = cell // footprints.GROUPS
        else:
            first = cell * self.grain
            last = first + self.grain - 1
        return Access(
            agent=component.agent if component.kind == "warp" else
            f"{component.kind} of {component.agent}",
            role=instr.opcode,
            what=what,
            space=f"{shadow.space} memory of {cta.name()}",
            first=first,
            last=last,
            line=instr.line,
            text=instr.text,
            source=getattr(instr, "source", ""),
        )
