"""Data races: two accesses of one cell, one of them a write, neither ordered after the other.

The order is that of the executed synchronisation, independent of the schedule. A wait gives only
the knowledge that it is sure to give (`PhaseClock.told`), so one favourable run is enough to find a
missing edge. The rules are those that kernels known right on hardware rely on. Each edge is named
with its manual section in `edges.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice

import numpy as np

from ptxemu.check import evidence, footprints
from ptxemu.check.agents import Agent, Ticket, WarpClock
from ptxemu.check.allocations import Coverage
from ptxemu.check.clocks import (
    ALL_LANES,
    ATOMIC,
    COMPONENT_SHIFT,
    LANE_SHIFT,
    ORDERED,
    STEP_SHIFT,
    Mark,
    Stamp,
    stamp,
)
from ptxemu.check.evidence import Evidence, Reason
from ptxemu.check.findings import Conflicts, Findings, Side, line_of
from ptxemu.check.footprints import Cells, Footprint, byte_cells
from ptxemu.check.global_memory import GlobalShadow, Piece
from ptxemu.check.lifetime import Lifetime
from ptxemu.check.shadow import Shadow
from ptxemu.check.state import States
from ptxemu.findings import Finding
from ptxemu.machine.state import Cta, Warp
from ptxemu.native.shadow import WRITES

_NO_LANE = ALL_LANES << LANE_SHIFT
Step = tuple[int, int]  # a component, and which step of it tells that an operation is complete
Unchanged = Callable[[int], bool]  # whether a write stores what is there already, at an address

_ACQUIRE = (
    "a wait, before the second copy, until the readers of the first have released its stage"
    " (producer_acquire of a pipeline); else another index of the stage"
)


class Races:
    """Compares each access with earlier ones. `memory`: the shadow of global memory."""

    def __init__(
        self,
        states: States,
        findings: Findings,
        lifetime: Lifetime,
        memory: GlobalShadow,
        coverage: Coverage,
    ) -> None:
        self.coverage = coverage
        self._pointers = coverage.pointers
        self._states = states
        self._sites = findings.sites
        self._grain = states.grain
        self._conflicts = Conflicts(findings)
        self._evidence = Evidence(states, findings.sites)
        self._lifetime = lifetime
        self.memory = memory
        # Who else hears of asynchronous accesses to shared memory: with the last writes, and where.
        self.touches: Callable[[Ticket, np.ndarray, Cells], None] | None = None

    # -- ordinary accesses --------------------------------------------------------------------

    def shared(
        self,
        w: Warp,
        cta: Cta,
        cells: Cells,
        lanes: np.ndarray | None,
        write: bool,
        unchanged: Unchanged | None = None,
    ) -> None:
        """Check an access to cells shared by all lanes, or to cells of each of the lanes."""
        clock = self._states.clocks[w]
        if cta is not w.cta:
            self._lifetime.reached(cta, clock.own, clock.now, w.at)
        self._compare(self._shadow(cta), cta, cells, clock, self.mark(w, lanes), write, unchanged)

    def shared_surely(
        self, w: Warp, cta: Cta, cells: Cells, lanes: np.ndarray | None, write: bool
    ) -> bool:
        """Check an access to shared memory; return whether it is ordered and reads defined data.

        If False, nothing was recorded.
        """
        clock, shadow = self._states.clocks[w], self._shadow(cta)
        done = shadow.surely(cells, clock, self.mark(w, lanes), write, defined=not write)
        if done and cta is not w.cta:
            self._lifetime.reached(cta, clock.own, clock.now, w.at)
        return done

    def mark(self, w: Warp, lanes: np.ndarray | None) -> Mark:
        """Return the mark of an ordinary access of `lanes`; None: of all active lanes to one
        address."""
        clock = self._states.clocks[w]
        if not w.how and lanes is not None:
            return Mark(stamp(clock.own, clock.now, 0, w.at), lanes)
        lane = ATOMIC if w.how else clock.components.lane_sets.code(w.frag.mask)
        return Mark(stamp(clock.own, clock.now, lane, w.at), lane)

    def global_(
        self,
        w: Warp,
        places: np.ndarray,
        nbytes: int,
        lanes: np.ndarray | None,
        *,
        write: bool,
        unchanged: Unchanged | None = None,
    ) -> None:
        """`nbytes` at each of `places`, int64 addresses."""
        piece = Piece(places, nbytes, w.cluster.index, self.mark(w, lanes))
        self._compare_global(piece, self._states.clocks[w], write, unchanged)

    def global_rows(
        self,
        ticket: Ticket,
        rows: tuple[np.ndarray, int],
        step: Step,
        *,
        write: bool = False,
        atomic: bool = False,
        unchanged: Unchanged | None = None,
    ) -> None:
        """Check rows (addresses, bytes of each) of an operation whose completion is `step`."""
        if not (len(rows[0]) and rows[1]):
            return
        lane = ATOMIC if atomic else ticket.lane
        mark = Mark(stamp(*step, lane, ticket.site), lane)
        piece = Piece(np.asarray(rows[0], np.int64), rows[1], ticket.agent.cta.cluster.index, mark)
        self._compare_global(piece, ticket, write, unchanged)

    def index_findings(self) -> Iterator[Finding]:
        """Yield findings of places to which two clusters wrote the same."""
        access = self._conflicts.access
        accesses = {
            key: (access(before), access(now))
            for key, (before, now) in self.coverage.repeated.items()
        }
        return self.coverage.findings(accesses)

    # -- asynchronous operations --------------------------------------------------------------

    def land(
        self,
        ticket: Ticket,
        cta: Cta,
        cells: Cells,
        step: Step,
        unchanged: Unchanged | None = None,
        *,
        atomic: bool = False,
    ) -> None:
        """Record bytes that arrive in shared memory, known to all waiters of phase `step`."""
        self._lifetime.reached(cta, *step, ticket.site)
        lane = ATOMIC if atomic else ticket.lane
        mark = Mark(stamp(*step, ATOMIC if atomic else ALL_LANES, ticket.site), lane)
        if self.touches is not None:
            self.touches(ticket, self._shadow(cta).last, cells)
        self._compare(self._shadow(cta), cta, cells, ticket, mark, True, unchanged)

    def land_surely(self, ticket: Ticket, cta: Cta, cells: Cells, step: Step) -> bool:
        """Record bytes as `land` if they are ordered after all earlier accesses.

        Returns False, with nothing recorded, if they may not be.
        """
        if self.touches is not None:
            return False
        mark = Mark(stamp(*step, ALL_LANES, ticket.site), ticket.lane)
        done = self._shadow(cta).surely(cells, ticket, mark, True)
        if done:
            self._lifetime.reached(cta, *step, ticket.site)
        return done

    def read_shared(self, ticket: Ticket, cta: Cta, cells: Cells, step: Step) -> bool:
        """Cells of shared memory. Returns whether all of them are known to have been written."""
        mark = Mark(stamp(*step, ALL_LANES, ticket.site), ticket.lane)
        if cta is not ticket.agent.cta:
            self._lifetime.reached(cta, *step, ticket.site)
        if self.touches is not None:
            self.touches(ticket, self._shadow(cta).last, cells)
        return self._compare(self._shadow(cta), cta, cells, ticket, mark, False)

    def copy(self, ticket: Ticket, cta: Cta, cells: Cells, lanes: np.ndarray) -> None:
        """cp.async writes shared memory: cells of each of the lanes."""
        mark = Mark(stamp(ticket.component, ticket.step, 0, ticket.site), lanes)
        self._compare(self._shadow(cta), cta, cells, ticket, mark, True)

    def execute(self, ticket: Ticket, ctas: Sequence[Cta], footprint: Footprint) -> bool:
        """Check an operation of the tensor core: tcgen05.mma or .cp.

        D of an MMA is written: that needs all that reading it would need. Returns whether its
        operands in shared memory are known to have been written.
        """
        written = True
        for cta in ctas:
            if cta is not ticket.agent.cta:
                self._lifetime.reached(cta, *ticket.position, ticket.site)
            done, never = 0, 0
            if self.touches is None:
                done, never = self._states.ctas[cta].surely(footprint, ticket)
            written &= not never
            if done < len(footprint.accesses):
                written &= self._execute(ticket, cta, footprint.accesses[done:])
        return written

    def _execute(
        self, ticket: Ticket, cta: Cta, accesses: Sequence[tuple[Cells, bool, bool]]
    ) -> bool:
        written, step = True, ticket.position
        for cells, tensor, write in accesses:
            if tensor:
                self._tensor(ticket, cta, cells, step, write)
            else:
                written &= self.read_shared(ticket, cta, cells, step)
        return written

    def shift(self, ticket: Ticket, ctas: Sequence[Cta], address: int) -> None:
        """tcgen05.shift."""
        for cta in ctas:
            self._tensor(ticket, cta, footprints.shifted_cells(address), ticket.position, True)

    # -- tensor memory ------------------------------------------------------------------------

    def _tensor(self, ticket: Ticket, cta: Cta, cells: Cells, step: Step, write: bool) -> None:
        if cta is not ticket.agent.cta:
            self._lifetime.reached(cta, *step, ticket.site)
        shadow, mark = self._states.ctas[cta].tensor, self._unit_mark(*step, ticket.site)
        self._compare(shadow, cta, cells, ticket, mark, write)

    def move(self, w: Warp, cells: Cells, write: bool) -> int:
        """Check tcgen05.ld or .st; return its step among those of the warp."""
        clock, shadow = self._states.clocks[w], self._states.ctas[w.cta].tensor
        component, step = clock.issue("tcgen05.st" if write else "tcgen05.ld")
        packed = component << COMPONENT_SHIFT | step << STEP_SHIFT | _NO_LANE | w.at
        by = clock.at("tensor"), 0, 0
        if not shadow.surely_one(cells, by, packed, ALL_LANES, WRITES if write else 0):
            mark = self._unit_mark(component, step, w.at)
            self._look(shadow, w.cta, cells, clock, mark, write)
        return step

    def columns(self, w: Warp, column: int, count: int, pair: bool, told: int | None) -> None:
        """Begin or end columns by tcgen05.alloc or .dealloc.

        With .cta_group::2 both CTAs of a pair take part, so that either knows of the other's
        operation. The address goes to shared memory, at offset `told`. It is known to all agents
        that know of the allocation: NVIDIA's fmha_bwd.py reads it after no more than a commit.
        """
        owner = w.cluster.ctas[w.cta.rank & ~1] if pair else w.cta
        holder, state = self._states.ctas[owner], self._states.ctas[w.cta]
        clock = self._states.clocks[w]
        if holder.allocations is None:
            holder.allocations = clock.components.add("tcgen05.alloc", owner.name())
        state.allocated += 1
        clock.know(holder.allocations, state.allocated)
        mark = self._unit_mark(holder.allocations, state.allocated, w.at)
        cells = footprints.column_cells(column, count)
        self._compare(state.tensor, w.cta, cells, clock, mark, True)
        if told is not None:
            self._compare(state.shared, w.cta, self.bytes(told, 4), clock, mark, True)

    @staticmethod
    def _unit_mark(component: int, step: int, site: int) -> Mark:
        return Mark(stamp(component, step, ALL_LANES, site), ALL_LANES)

    # -- comparisons --------------------------------------------------------------------------

    def bytes(self, low: int, nbytes: int) -> Cells:
        """Cells of shared memory."""
        return byte_cells(low, nbytes, self._grain)

    def _shadow(self, cta: Cta) -> Shadow:
        return self._states.ctas[cta].shared

    def _compare(self, shadow: Shadow, cta: Cta, cells: Cells, by: Agent, mark: Mark,
                 write: bool, unchanged: Unchanged | None = None) -> bool:  # fmt: skip
        """Returns whether all cells are known to have been written before."""
        if shadow.surely(cells, by, mark, write):
            return shadow.all_written
        self._look(shadow, cta, cells, by, mark, write, unchanged)
        return False

    def _look(self, shadow: Shadow, cta: Cta, cells: Cells, by: Agent, mark: Mark,
              write: bool, unchanged: Unchanged | None = None) -> None:  # fmt: skip
        """Compare an access that may be a race."""
        where = cells.index()

        def on_race(old: int, cell: int) -> None:
            if shadow.space == "tensor":
                bounds = (cell // footprints.GROUPS,) * 2
            else:
                bounds = (cell * self._grain, cell * self._grain + self._grain - 1)
            known = self._states.components(cta).known
            place = (f"{shadow.space} memory of {cta.name()}", *bounds, known)
            before = Side(*place, Stamp.of(old), shadow.wrote(old, cell))
            if before.wrote and unchanged and unchanged(cell):
                return
            now = Side(*place, Stamp.of(mark.first), write)
            found = self._of_copies(before, now, by, self._evidence.reason(before, by))
            asked = (found.missing, found.rule)
            report = partial(self._conflicts.report, before, now, asked, found.why)
            if not self._load_given_up(before, now, report):
                report()

        if write and shadow.space == "shared":
            agent = by.agent if isinstance(by, WarpClock) else by.agent.agent
            self._lifetime.written(cta, where, agent, Stamp.of(mark.first).site)
        (shadow.write if write else shadow.read)(where, by, mark, on_race)

    def _of_copies(self, before: Side, now: Side, by: Agent, usual: Reason) -> Reason:
        """Two copies into one place that complete on different mbarriers are of different stages;
        if one line issues both and its warp never waits, the place may not be free."""
        kinds = before.component.kind, now.component.kind
        if not (before.wrote and now.wrote) or kinds != ("mbarrier", "mbarrier"):
            return usual
        if before.component is not now.component:
            missing = f"an index of the stage that goes with its mbarrier; else {usual.missing}"
            why = "copies of different mbarriers bring the same bytes"
            return usual._replace(missing=missing, why=why)
        lines = {line_of(self._sites[side.stamp.site]) for side in (before, now)}
        waits = (by if isinstance(by, WarpClock) else by.agent).phase_waits
        if waits or len(lines) > 1 or usual[:2] != evidence.MISSING["mbarrier"]:
            return usual
        return usual._replace(missing=_ACQUIRE, why="two copies, one after the other, go there")

    def _load_given_up(self, before: Side, now: Side, report: Callable[[], None]) -> bool:
        """Columns are deallocated under a tcgen05.ld that is not complete: it matters if one of its
        registers is still used. FlashAttention-4's head_dim 256 leaves loads of rows beyond the
        end open."""
        load, clock = before.stamp, before.component.owner
        if (before.component.kind, now.component.kind) != ("tcgen05.ld", "tcgen05.alloc"):
            return False
        if clock.knows(load.component, load.step) or not self._ever_used(load.site):
            return False
        clock.given_up.append((load.step, report))
        return True

    def _ever_used(self, site: int) -> bool:
        """Whether any other instruction names a register that the load at `site` fills."""
        load = self._sites[site]
        filled = set(re.findall(r"%\w+", load.text.split("[")[0]))
        others = (each for each in self._sites if each is not load)
        return any(filled.intersection(re.findall(r"%\w+", each.text)) for each in others)

    def _compare_global(
        self, piece: Piece, by: Agent, write: bool, unchanged: Unchanged | None
    ) -> None:
        clusters = self._states.clusters

        def on_race(old: int, owner: int, address: int, was_write: bool) -> bool:
            place = ("global memory", address, address + self.memory.grain - 1)
            known = [clusters[cluster].components.known for cluster in (owner, piece.cluster)]
            name = self._pointers.name(address)
            before = Side(*place, known[0], Stamp.of(old), was_write, name)
            now = Side(*place, known[1], Stamp.of(piece.mark.first), write, name)
            if was_write and unchanged and unchanged(address):
                if owner != piece.cluster:
                    self.coverage.repeats(before, now)
                return True
            if owner == piece.cluster:
                reason, whose = self._evidence.reason(before, by), "warp"
            else:
                reason, whose = Reason(*evidence.missing_abroad(before, by, owner)), "CTA"
            reason = _of_global(before, now, reason, whose)
            self._conflicts.report(before, now, (reason.missing, reason.rule), reason.why)
            return False

        if self.memory.before is not None:
            self._compare_launches(self.memory.before, piece, by, write)
        (self.memory.write if write else self.memory.read)(piece, by, on_race)

    def _compare_launches(self, before: GlobalShadow, piece: Piece, by: Agent, write: bool) -> None:
        """A dependent launch may begin before the one before it has ended. Its wait is for that
        one, which may itself have left others running."""
        grid = self._states.clusters[piece.cluster].grid_before
        waited = int(grid < by.rows.shape[1] and by.rows[ORDERED, grid])
        for shadow in islice(before.chain(), waited, None):
            address = shadow.touches(piece, write)
            if address is not None:
                self._conflicts.with_launch_before(address, Stamp.of(piece.mark.first), write)
                return


def _of_global(before: Side, now: Side, usual: Reason, whose: str) -> Reason:
    """Two warps or CTAs that store to one element of global memory are seldom meant to."""
    stores = before.component.kind == now.component.kind == "bulk write"
    unordered = stores or usual[:2] in (evidence.FLAG, evidence.PEER, evidence.MISSING["warp"])
    if not (unordered and before.wrote and now.wrote):
        return usual
    whose = "store" if stores and whose == "warp" else whose
    missing = f"an index or a bound that gives each {whose} its own elements; else {usual.missing}"
    return usual._replace(missing=missing, why=f"two {whose}s write the same element")
