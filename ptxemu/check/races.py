"""Data races: two accesses of one cell, one of them a write, neither ordered after the other.

The order is that of the synchronisation a launch executed, whatever the schedule happened to be: a
wait tells only what it is sure to tell (`PhaseClock.told`), so one friendly run is enough to see
that an edge is missing. Rules are those that kernels known right on hardware rely on; each edge is
named with its manual section in `edges.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import numpy as np

from ptxemu.check import explain, footprints
from ptxemu.check.agents import PhaseClock, Ticket, WarpClock
from ptxemu.check.clocks import (
    ALL_LANES,
    ATOMIC,
    LANE_SHIFT,
    ORDERED,
    Components,
    Mark,
    Stamp,
    stamp,
)
from ptxemu.check.conflict import Conflicts, Side
from ptxemu.check.global_memory import Flags, GlobalShadow, Piece
from ptxemu.check.shadow import Shadow, Where

Agent = WarpClock | Ticket


class Races:
    """The checker of one launch: shadows of every memory, and what is found."""

    def __init__(self, machine: object) -> None:
        self.machine = machine
        self.sites = machine.program.sites
        self.grain = machine.program.shared_grain
        self.conflicts = Conflicts(machine)
        self._known: set[tuple] = set()
        self.strict = machine.options.strict
        self.memory = GlobalShadow(machine.program.global_grain)
        self.flags = Flags()
        self.clusters: dict[int, object] = {}
        self.rewrites: Callable[[], bool] | None = None  # the write under way changes nothing

    # -- beginnings ---------------------------------------------------------------------------

    def cluster_started(self, cluster: object) -> None:
        cluster.components = Components()
        cluster.grid_before = cluster.components.add("grid", "the launch before")
        self.clusters[cluster.index] = cluster

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
        else:
            where = footprints.bytes_of(starts.astype(np.int64), nbytes, self.grain)
        mark = self._mark(w, lanes, None if lanes is None else where.shape)
        self._compare(cta.shared_shadow, cta, where, clock, mark, write)
        if w.how:
            self.strong(w, (cta.cluster.index, cta.rank, int(np.min(starts))), w.how, write)

    def _mark(self, w: object, lanes: np.ndarray | None, shape: tuple[int, ...] | None) -> Mark:
        """Of an ordinary access of `lanes`, None: of no one in particular."""
        lane = ATOMIC if w.how else ALL_LANES
        if lanes is not None and not w.how:
            lane = np.broadcast_to(lanes.astype(np.int64), shape)
        packed = stamp(w.clock.own, w.clock.now, 0, w.at) + (lane << LANE_SHIFT)
        return Mark(packed, lane)

    def global_(
        self,
        w: object,
        starts: int | np.ndarray,
        nbytes: int,
        lanes: np.ndarray | None,
        write: bool,
    ) -> None:
        """The same in global memory, at addresses."""
        places = np.atleast_1d(np.asarray(starts)).astype(np.int64)
        mark = self._mark(w, lanes, places.shape)
        self._compare_global(Piece(places, nbytes, w.cluster.index, mark), w.clock, write)
        if w.how:
            self.strong(w, int(places[0]), w.how, write)

    def _global_rows(
        self,
        ticket: Ticket,
        rows: tuple,
        step: tuple[int, int],
        *,
        write: bool,
        atomic: bool = False,
    ) -> None:
        """Rows (addresses, bytes of each) of an operation whose completion `step` tells."""
        lane = ATOMIC if atomic else ticket.lane
        mark = Mark(stamp(*step, lane, ticket.site), lane)
        piece = Piece(np.asarray(rows[0], np.int64), rows[1], ticket.agent.cta.cluster.index, mark)
        self._compare_global(piece, ticket, write)

    # -- asynchronous operations --------------------------------------------------------------

    def ticket(self, w: object, kind: str = "") -> Ticket:
        """For an operation that the active lanes issue now."""
        mask = w.frag.mask
        if kind == "tensor core":
            self.tensor_used(w)
        lane = mask.bit_length() - 1 if mask & (mask - 1) == 0 else ALL_LANES
        return Ticket(w.clock, lane, w.at, kind)

    def shared_async(
        self, ticket: Ticket, cta: object, where: Where, step: tuple[int, int], write: bool
    ) -> None:
        """Cells of shared memory; `step`: the component and its step that tell completion."""
        mark = Mark(stamp(*step, ALL_LANES, ticket.site), ticket.lane)
        if cta is not ticket.agent.cta:
            self.reached(cta, *step, ticket.site)
        self._compare(cta.shared_shadow, cta, where, ticket, mark, write)

    def shared_bytes(self, low: int, nbytes: int) -> slice:
        return slice(low // self.grain, -(-(low + nbytes) // self.grain))

    def landed(self, ticket: Ticket, places: list, nbytes: int, signals: list) -> tuple[int, int]:
        """Bytes arrive in shared memory and complete on mbarriers, one for all places or one each:
        the places are known to whoever waits for the phase. Returns the last place's step."""
        step = (0, 0)
        for number, (cta, offset) in enumerate(places):
            phases = signals[min(number, len(signals) - 1)].clock_of
            step = (phases.component, len(phases.phases) + 1)
            self.reached(cta, *step, ticket.site)
            mark = Mark(stamp(*step, ALL_LANES, ticket.site), ticket.lane)
            cells = self.shared_bytes(offset, nbytes)
            self._compare(cta.shared_shadow, cta, cells, ticket, mark, True)
        for barrier in signals:
            self.signalled(ticket, barrier)
        return step

    def loaded(
        self, ticket: Ticket, source: tuple, places: list, nbytes: int, signals: list
    ) -> None:
        """A bulk load: `source` (addresses, bytes of each) in global memory, then as `landed`."""
        step = self.landed(ticket, places, nbytes, signals)
        if len(source[0]) and source[1]:
            self._global_rows(ticket, source, step, write=False)

    def stored(self, ticket: Ticket, target: tuple, *, atomic: bool = False) -> None:
        """A bulk store or reduction has come to global memory: (addresses, bytes of each)."""
        if len(target[0]) and target[1]:
            step = (ticket.agent.stream("bulk write"), ticket.step)
            self._global_rows(ticket, target, step, write=True, atomic=atomic)

    def fetched(self, ticket: Ticket, starts: np.ndarray, nbytes: int) -> None:
        """cp.async reads global memory."""
        step = (ticket.component, ticket.step)
        self._global_rows(ticket, (starts, nbytes), step, write=False)

    def source_read(self, ticket: Ticket, cta: object, low: int, nbytes: int) -> None:
        """A bulk store or reduction reads shared memory."""
        step = (ticket.component, ticket.step)
        self.shared_async(ticket, cta, self.shared_bytes(low, nbytes), step, False)

    def copied(self, ticket: Ticket, cta: object, pieces: tuple, nbytes: int) -> None:
        """cp.async writes shared memory; pieces: (offsets, the lane of each)."""
        offsets, lanes = pieces
        where = footprints.bytes_of(offsets, nbytes, self.grain)
        mark = stamp(ticket.component, ticket.step, ALL_LANES, ticket.site)
        own = Mark(mark, np.broadcast_to(lanes, where.shape))
        self._compare(cta.shared_shadow, cta, where, ticket, own, True)

    def multiply(self, ticket: Ticket, ctas: list, d: int, operands: tuple, instr: object) -> None:
        """tcgen05.mma; operands: A (descriptor or address in tensor memory), B, where the scale
        factors are, None without, and whether A's rows move. D is written, and what a write needs
        is all that reading it would need."""
        a, b, scales, shifted = operands
        step = (ticket.component, ticket.step)
        group = len(ctas)
        for cta in ctas:
            b_cells = footprints.operand_cells(
                b, instr.n // group, instr.k, instr.b_format, instr.b_mn_major, self.grain
            )
            self.shared_async(ticket, cta, b_cells, step, False)
            if isinstance(a, int):
                a_cells = footprints.tensor_operand_cells(a, instr)
                self.tensor_async(ticket, cta, a_cells, step, shifted)
            else:
                a_cells = footprints.operand_cells(
                    a, instr.m // group, instr.k, instr.a_format, instr.a_mn_major, self.grain
                )
                self.shared_async(ticket, cta, a_cells, step, False)
            if scales:
                for where in scales.placements(instr, group):
                    cells = footprints.scale_cells(where)
                    self.tensor_async(ticket, cta, cells, step, False)
            cells = footprints.accumulator_cells(d, instr, group)
            self.tensor_async(ticket, cta, cells, step, True)

    def fill(self, ticket: Ticket, ctas: list, address: int, desc: object, shape: object) -> None:
        """tcgen05.cp: a matrix of shared memory goes to tensor memory, in every CTA."""
        step = (ticket.component, ticket.step)
        for cta in ctas:
            source = footprints.matrix_cells(desc, shape.matrix, self.grain)
            self.shared_async(ticket, cta, source, step, False)
            self.tensor_async(ticket, cta, footprints.filled_cells(address, shape), step, True)

    # -- tensor memory ------------------------------------------------------------------------

    def tensor_async(
        self, ticket: Ticket, cta: object, where: Where, step: tuple[int, int], write: bool
    ) -> None:
        if cta is not ticket.agent.cta:
            self.reached(cta, *step, ticket.site)
        self._compare(
            cta.tensor_shadow, cta, where, ticket, self._unit_mark(*step, ticket.site), write
        )

    def moved(self, w: object, address: int, move: tuple, write: bool) -> int:
        """tcgen05.ld or .st; returns its step among those of the warp."""
        self.tensor_used(w)
        kind = "tcgen05.st" if write else "tcgen05.ld"
        component, step = w.clock.issue(kind)
        where = footprints.moved_cells(move, address, w.index % 4)
        mark = self._unit_mark(component, step, w.at)
        self._compare(w.cta.tensor_shadow, w.cta, where, w.clock, mark, write)
        return step

    def columns(
        self, w: object, column: int, count: int, pair: bool, told: int | None = None
    ) -> None:
        """tcgen05.alloc and .dealloc: columns begin or end. With .cta_group::2 both CTAs of a pair
        take part, so that either knows of the other's. The address goes to shared memory, at
        offset `told`, and is known to whoever knows of the allocation: NVIDIA's fmha_bwd.py reads
        it behind no more than a commit."""
        owner = w.cluster.ctas[w.cta.rank & ~1] if pair else w.cta
        components = w.cluster.components
        if owner.allocations is None:
            owner.allocations = components.add("tcgen05.alloc", owner.name())
        w.cta.allocated += 1
        w.clock.know(owner.allocations, w.cta.allocated)
        mark = self._unit_mark(owner.allocations, w.cta.allocated, w.at)
        where = footprints.column_cells(column, count)
        self._compare(w.cta.tensor_shadow, w.cta, where, w.clock, mark, True)
        if told is not None:
            place = self.shared_bytes(told, 4)
            self._compare(w.cta.shared_shadow, w.cta, place, w.clock, mark, True)

    @staticmethod
    def _unit_mark(component: int, step: int, site: int) -> Mark:
        return Mark(stamp(component, step, ALL_LANES, site), ALL_LANES)

    # -- findings -----------------------------------------------------------------------------

    def _compare(self, shadow: Shadow, cta: object, where: Where, by: Agent, mark: Mark,
               write: bool) -> None:  # fmt: skip
        def on_race(old: int, cell: int) -> None:
            if shadow.space == "tensor":
                bounds = (cell // footprints.GROUPS,) * 2
            else:
                bounds = (cell * self.grain, cell * self.grain + self.grain - 1)
            place = (
                f"{shadow.space} memory of {cta.name()}",
                *bounds,
                cta.cluster.components.known,
            )
            before = Side(*place, Stamp.of(old), int(shadow.last[cell]) == old)
            if before.wrote and self.rewrites and self.rewrites():
                return
            now = Side(*place, Stamp.of(mark.first), write)
            report = partial(self.conflicts.report, before, now, explain.missing(before, by))
            if not self._load_given_up(before, now, report):
                report()

        (shadow.write if write else shadow.read)(where, by, mark, on_race)

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
        load = self.sites[site]
        filled = set(re.findall(r"%\w+", load.text.split("[")[0]))
        others = (each for each in self.sites if each is not load)
        return any(filled.intersection(re.findall(r"%\w+", each.text)) for each in others)

    def _compare_global(self, piece: Piece, by: Agent, write: bool) -> None:
        def on_race(old: int, owner: int, address: int, was_write: bool) -> bool:
            if was_write and self.rewrites and self.rewrites():
                return True
            place = ("global memory", address, address + self.memory.grain - 1)
            known = [self.clusters[cluster].components.known for cluster in (owner, piece.cluster)]
            before = Side(*place, known[0], Stamp.of(old), was_write)
            now = Side(*place, known[1], Stamp.of(piece.mark.first), write)
            if owner == piece.cluster:
                missing = explain.missing(before, by)
            else:
                missing = explain.missing_abroad(before, by, owner)
            self.conflicts.report(before, now, missing)
            return False

        if self.memory.before is not None:
            self._compare_launches(piece, by, write)
        (self.memory.write if write else self.memory.read)(piece, by, on_race)

    def _compare_launches(self, piece: Piece, by: Agent, write: bool) -> None:
        """A dependent launch may begin before the one before it has ended."""
        grid = self.clusters[piece.cluster].grid_before
        if grid < by.rows.shape[1] and by.rows[ORDERED, grid]:
            return
        address = self.memory.before.touches(piece, write)
        if address is not None:
            self.conflicts.with_launch_before(address, Stamp.of(piece.mark.first), write)
