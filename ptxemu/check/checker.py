"""Checker of a launch, which forwards events to its parts.

`Races` compares accesses, `Edges` updates clocks, `Lifetime` follows objects, `Manual` has the
rules of the manual's text alone, and `Taint` follows undefined data; see `Options.check`. `Taint`
may stop a block (`UndefinedRead`), so it is called first: the block is executed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from ptxemu.check import footprints
from ptxemu.check.agents import Ticket
from ptxemu.check.allocations import Bounds, Coverage, Pointers
from ptxemu.check.announced import Announcements
from ptxemu.check.barrier_names import BarrierNames, Given
from ptxemu.check.clocks import ALL_LANES, masks_named, not_named
from ptxemu.check.edges import Edges
from ptxemu.check.findings import Findings
from ptxemu.check.footprints import Cells, Scattered, byte_cells, moved_cells
from ptxemu.check.global_memory import GlobalShadow
from ptxemu.check.kernel_text import check_text, unheeded
from ptxemu.check.lifetime import Lifetime
from ptxemu.check.manual import Manual
from ptxemu.check.own_shared import checks_of
from ptxemu.check.races import Races, Unchanged
from ptxemu.check.state import States
from ptxemu.check.taint import Padding
from ptxemu.check.taint_memory import Taint
from ptxemu.check.tensor_loads import TensorLoads
from ptxemu.check.tensor_maps import MAP_BYTES, TensorMaps
from ptxemu.check.unused import Unused
from ptxemu.check.wgmma import Warpgroups
from ptxemu.codegen.program import Program
from ptxemu.errors import PtxEmuError
from ptxemu.findings import Finding
from ptxemu.machine.async_ops import Work
from ptxemu.machine.deadlock import Slip, Stall, Who
from ptxemu.machine.fragment import Waiters
from ptxemu.machine.listener import How, Lanes, Listener, Place, Position, Rows, Signals, Starts
from ptxemu.machine.mbarrier import MBarrier
from ptxemu.machine.memory import GlobalMemory, Stray, as_addresses
from ptxemu.machine.mma import Mma
from ptxemu.machine.state import Cluster, Cta, Multiplication, NamedBarrier, Warp, Warpgroup
from ptxemu.machine.tensor_map import TensorMap
from ptxemu.machine.tma_tile import box_rows, inside
from ptxemu.machine.tmem import Move, PendingLoad
from ptxemu.machine.tmem_fill import Fill
from ptxemu.machine.umma_desc import SmemDesc
from ptxemu.numerics import PerLane

_TENSOR_CORE = "tensor core"  # the stream of its operations


class Forwarding(Listener):
    """The parts, which `checker.Checker` makes."""

    states: States
    lifetime: Lifetime
    announced: Announcements
    taint: Taint
    edges: Edges
    warpgroups: Warpgroups
    manual: Manual
    loads: TensorLoads

    # -- states --------------------------------------------------------------------------

    def cluster_started(self, cluster: Cluster) -> None:
        self.states.cluster_started(cluster)

    def cta_started(self, cta: Cta) -> None:
        self.states.cta_started(cta)

    def mbarrier_initialised(self, w: Warp, cta: Cta, barrier: MBarrier) -> None:
        self.states.mbarrier_initialised(w, cta, barrier)

    # -- lifetime ------------------------------------------------------------------------

    def mbarrier_replaced(self, w: Warp, barrier: MBarrier) -> None:
        self.lifetime.mbarrier_replaced(w, barrier)

    # -- taint ---------------------------------------------------------------------------

    def local_access(
        self, w: Warp, lanes: np.ndarray, elements: np.ndarray, size: int, write: bool
    ) -> None:
        self.taint.local_access(w, lanes, elements, size, write)

    def atomic(self, w: Warp, space: str, name: str, address: Starts, size: int) -> None:
        self.taint.atomic(w, space, name, address, size)

    # -- edges ---------------------------------------------------------------------------

    def mbarrier_waited(self, w: Warp, cta: Cta, barrier: MBarrier, parity: int, how: How) -> None:
        self.edges.mbarrier_waited(w, cta, barrier, parity, how)

    def mbarrier_tested(self, w: Warp, cta: Cta, barrier: MBarrier, parity: int, how: How) -> None:
        self.edges.mbarrier_tested(w, cta, barrier, parity, how)

    def barrier_arrival(self, w: Warp, barrier: NamedBarrier) -> None:
        self.edges.barrier_arrival(w, barrier)

    def barrier_completed(self, barrier: NamedBarrier, waiters: Waiters) -> None:
        self.edges.barrier_completed(barrier, waiters)

    def cluster_arrival(self, w: Warp, relaxed: bool) -> None:
        self.edges.cluster_arrival(w, relaxed)

    def cluster_completed(self, cluster: Cluster) -> None:
        self.edges.cluster_completed(cluster)

    def cluster_waited(self, w: Warp) -> None:
        self.edges.cluster_waited(w)

    def grid_waited(self, w: Warp) -> None:
        self.edges.grid_waited(w)

    def copies_waited(self, w: Warp, allowed: int | None) -> None:
        self.edges.copies_waited(w, allowed)

    def bulk_committed(self, w: Warp) -> None:
        self.edges.bulk_committed(w)

    def bulk_waited(self, w: Warp, allowed: int, read: bool) -> None:
        self.edges.bulk_waited(w, allowed, read)

    # -- warpgroups ----------------------------------------------------------------------

    def warpgroup_joined(self, w: Warp, group: Warpgroup, number: int) -> None:
        self.warpgroups.warpgroup_joined(w, group, number)

    def warpgroup_multiply(self, what: Multiplication) -> None:
        self.warpgroups.warpgroup_multiply(what)

    def warpgroup_waited(self, w: Warp, group: Warpgroup, last: int) -> None:
        self.warpgroups.warpgroup_waited(w, group, last)

    def accumulator_used(self, w: Warp, what: Multiplication) -> None:
        self.warpgroups.accumulator_used(w, what)

    # -- loads of tensor memory ----------------------------------------------------------

    def tensor_used(self, w: Warp, load: PendingLoad) -> None:
        self.loads.used(w, load)

    def tensor_loads_waited(self, w: Warp) -> None:
        self.loads.waited(w)

    # -- manual --------------------------------------------------------------------------

    def fence_tensor(self, w: Warp, before: bool) -> None:
        self.manual.fence_tensor(w, before)


class Checker(Forwarding):
    """Checker of one launch.

    Args:
        memory: Global memory of the launch.
        params: Its parameters.
        found: List to which findings are added.
        before: Accesses to global memory in the previous launch, if that may still be running.

    `shadow` holds the accesses of this launch.
    """

    immediate = True

    def __init__(
        self,
        program: Program,
        memory: GlobalMemory,
        params: np.ndarray,
        found: list[Finding],
        *,
        strict: bool = False,
        before: GlobalShadow | None = None,
    ) -> None:
        self.program = program
        self.memory = memory
        self.shadow = GlobalShadow(program.global_grain, before)
        self.states = States(program.shared_grain)
        self._found, self._strict = found, strict
        self.findings = Findings(program.sites, found)
        text_findings, unheeded_waits = _of_text(program)
        for finding in text_findings:
            self.findings.report(finding)
        self.lifetime = Lifetime(self.states, self.findings, strict)
        self.announced = Announcements(self.states, self.findings)
        self.manual = Manual(self.states, self.findings, strict)
        pointers = Pointers(memory, params, program.layout.params)
        self.coverage = Coverage(memory, self.shadow, pointers, program.sites)
        self.races = Races(self.states, self.findings, self.lifetime, self.shadow, self.coverage)
        self.races.touches = self.manual.touched if strict else None
        self.loads = TensorLoads(program, self.states, self.findings, self.races, self.manual)
        self.edges = Edges(self.states, self.lifetime, self.manual, self.loads, unheeded_waits)
        self.tensor_maps = TensorMaps(self.states, self.findings, self.shadow)
        self.warpgroups = Warpgroups(program, self.states, self.findings, self.races)
        self.taint = Taint(self.states, self.findings, program.flows, _padding(program))
        self.bounds = Bounds(program, self.findings, self.states.tickets, pointers)
        self.unused = Unused(self.states, self.findings)
        self._own_shared: dict[Warp, Callable[[int, int, bool], bool]] = {}
        self.shadow.inside, self.shadow.holds = memory.inside, memory.holds

    def completed(self) -> list[str]:
        """The launch has ended by itself. Returns `LaunchReport.partly`."""
        for finding in self.races.index_findings():
            self.findings.report(finding)
        return self.coverage.partly()

    def unused_data(self) -> list[str]:
        """`LaunchReport.unused`."""
        return list(self.unused.lines(self.memory, self.shadow, self.coverage.pointers))

    def told(self) -> tuple[Any, ...]:
        """Return the state of clusters without findings, for `add` in another process."""
        return self.shadow.told(), self.unused.told(), self.states.has_waited

    def add(self, told: tuple[Any, ...]) -> None:
        """Add the state of other clusters whose accesses do not conflict with those known here."""
        self.shadow.add(told[0])
        self.unused.add(told[1])
        self.states.has_waited |= told[2]

    def forget(self) -> None:
        """Let go of a launch that has ended well, see `States.forget`."""
        self.states.forget()
        self.taint.forget()
        self.lifetime.forget()
        self._own_shared.clear()

    def left(self) -> GlobalShadow:
        """Return the accesses that the next launch has to be ordered after.

        A launch that waits for this one waits for the previous one only where this one did, however
        late.
        """
        if self.states.has_waited:
            self.shadow.before = None
        return self.shadow

    def name_barriers(self, given: Given | None, error: PtxEmuError | None = None) -> None:
        """Name mbarriers in all findings, and in the error that ended the launch.

        given: `Options.names`.
        """
        if not any("mbarrier" in str(each) for each in (*self._found, error)):
            return
        names = self._names(given)
        self._found[:] = map(names.within, self._found)
        if error is not None:
            error.message = names.text(error.message)

    def named(self, given: Given | None, finding: Finding) -> Finding:
        """Return one finding with mbarriers named."""
        return self._names(given).within(finding) if "mbarrier" in str(finding) else finding

    def told_deadlock(self, stall: Stall) -> Stall:
        """Add what waits have shown before the deadlock."""
        slips: dict[str, Slip] = {}
        for w, clock in self.states.clocks.items():
            if clock.slipped is not None:
                component, site, before, now = clock.slipped
                agent = clock.components.known[component].agent.removeprefix("mbarrier ")
                offset, _, cta = agent.partition(" of ")
                who = Who(w.index, w.cta.name(), w.cluster.index)
                on = "mbarrier", cta, int(offset, 16)
                slips[who.name] = Slip(who, on, self.program.sites[site], before, now)
        return replace(stall, slips=slips)

    def _names(self, given: Given | None) -> BarrierNames:
        inits = {
            barrier.offset: self.program.sites[phases.init_site]
            for barrier, phases in self.states.phases.items()
        }
        return BarrierNames(given, self.program.layout, inits)

    # -- beginnings and ends ------------------------------------------------------------------

    def warp_started(self, w: Warp) -> None:
        self.states.start_warp(w)
        self.taint.start_warp(w)
        checks = checks_of(self.states, w, self.taint.flow_of(w))
        if checks is not None:
            self._own_shared[w] = checks.one
            if len(w.listeners) == 1 and w.cta.unfenced is None:
                w.told = checks.lanes

    def cta_ended(self, cta: Cta) -> None:
        self.unused.ended(cta)
        self.lifetime.cta_ended(cta)
        self.states.cta_ended(cta)

    def warp_ended(self, w: Warp) -> None:
        self.manual.copies_at_exit(w)
        self.lifetime.warp_ended(w)

    def outside(self, stray: Stray) -> None:
        """Report an access to memory that was not passed to the kernel."""
        self.bounds.stray(stray)

    # -- accesses by a warp -------------------------------------------------------------------

    def shared_access(
        self, w: Warp, cta: Cta, starts: Starts, nbytes: int, lanes: Lanes, write: bool
    ) -> None:
        stored, w.storing = w.storing, None
        if lanes is None and cta is w.cta and w in self._own_shared:
            assert isinstance(starts, int)
            if self._own_shared[w](starts, nbytes, write):
                return
        grain = self.states.grain
        cells: Cells
        if isinstance(starts, np.ndarray):
            cells = Scattered(starts, nbytes, grain)
        else:
            cells = byte_cells(starts, nbytes, grain)
        self.manual.accessed(w, write)
        if not w.how and self.taint.simple(w, cta, write):
            if self.races.shared_surely(w, cta, cells, lanes, write):
                return
        self.taint.shared(w, cta, cells, lanes, write)
        same = None
        if write and stored is not None:
            same = partial(self._repeats, w, cta, starts, cells, stored)
        self.races.shared(w, cta, cells, lanes, write, same)
        if w.how:
            first = int(np.min(starts))
            self.edges.strong(w, (cta.cluster.index, cta.rank, first), w.how, write)

    def _repeats(
        self, w: Warp, cta: Cta, starts: Starts, cells: Cells, stored: np.ndarray, _: int
    ) -> bool:
        """Return whether a store to shared memory writes what is there: several warps set a flag,
        or execute one store of equal values. stored: [element, start].

        Equal values of two instructions at several addresses are more likely equal by chance.
        """
        places, size = np.atleast_1d(starts), stored.itemsize
        flag = bool((places == places[0]).all())
        if not (flag or set(self.states.ctas[cta].shared.writers(cells)) <= {0, w.at}):
            return False
        steps = np.arange(len(stored))[:, None]
        return bool((cta.views[size][places // size + steps] == stored).all())

    def global_read(self, w: Warp, starts: Starts, nbytes: int, lanes: Lanes) -> None:
        places = np.atleast_1d(np.asarray(starts)).astype(np.int64)
        self.races.global_(w, places, nbytes, lanes, write=False)
        if w.how:
            self.edges.strong(w, int(places[0]), w.how, False)

    def global_write(
        self, w: Warp, starts: np.ndarray, size: int, values: np.ndarray, lanes: Lanes
    ) -> None:
        """CTAs may store the same value to one address: FlashAttention-4's flash_bwd_preprocess
        does so for rows that two of its tiles share, dense_gemm_ptr_array.py for tensor maps."""
        count = len(values)

        def unchanged(address: int) -> bool:
            if self.memory.inside(starts, size * count) is not None:
                return False  # a read of what is outside would be reported in the store's place
            offset = address - places
            met = (offset > -self.shadow.grain) & (offset < size * count)
            same = self.memory.gather(starts, size, count) == values
            return bool(same[np.maximum(offset[met] // size, 0), met].all())

        self.manual.accessed(w, False)
        places = starts.astype(np.int64)
        self.races.global_(w, places, size * count, lanes, write=True, unchanged=unchanged)
        if w.how:
            self.edges.strong(w, int(places[0]), w.how, True)

    # -- synchronisation ----------------------------------------------------------------------

    def mbarrier_arrival(
        self, w: Warp, cta: Cta, barrier: MBarrier, how: How, count: tuple[int, int] = (1, 1)
    ) -> None:
        self.announced.arrived(barrier, self.states.clocks[w].rows)
        self.edges.arrival(w, cta, barrier, how)
        self.lifetime.counted(w.at, barrier, *count)

    def mbarrier_expected(self, w: Warp, cta: Cta, barrier: MBarrier, nbytes: int) -> None:
        if nbytes > 0:
            self.announced.expected(w, barrier, nbytes)

    def mbarrier_completed(self, barrier: MBarrier) -> None:
        self.announced.completed(barrier)
        self.states.phases[barrier].completed()

    def warp_synced(self, w: Warp, members: PerLane) -> None:
        """bar.warp.sync orders memory between the lanes that it names ("bar.warp.sync")."""
        clock = self.states.clocks[w]
        for named in masks_named(members, w.frag.mask):
            if named & w.live == w.live:
                clock.together()
            elif named & w.live:
                clock.together_some(named & w.live)

    def lanes_named(self, w: Warp, members: PerLane) -> None:
        """Check that all executing lanes are in the mask of an instruction with .sync.

        Sections: "shfl.sync", "vote.sync", "match.sync", "redux.sync", "elect.sync",
        "bar.warp.sync".
        """
        absent = not_named(members, w.frag.mask)
        if absent:
            opcode = self.findings.sites[w.at].opcode
            self.findings.at(
                "lanes",
                f"lanes {absent:#010x} of {w.label} execute {opcode}, whose mask does not name"
                " them: what it gives is undefined",
                w.at,
                missing="a mask of all lanes that execute it, or a branch around it",
                rule=".".join(opcode.split(".")[:2]),
            )

    def fence(self, w: Warp, near: bool) -> None:
        self.loads.before_signal(w)
        self.states.clocks[w].fence(near=near)

    def fence_init(self, w: Warp) -> None:
        self.states.clocks[w].fence_init()

    def fence_proxy(self, w: Warp, spaces: tuple[str, ...]) -> None:
        self.states.clocks[w].fence_proxy(spaces)

    # -- tensor maps --------------------------------------------------------------------------

    def map_edited(self, w: Warp, place: Place) -> None:
        self.races.shared(w, place[0], self.races.bytes(place[1], MAP_BYTES), None, True)

    def map_written(
        self, w: Warp, address: int, image: np.ndarray, copied: Place | None = None
    ) -> None:
        """Record the write of a map; several warps may write equal bytes.

        CUTLASS's dense_gemm_ptr_array.py does so.
        """
        starts = as_addresses([address])

        def unchanged(_: int) -> bool:
            return np.array_equal(self.memory.read_rows(starts, len(image))[0], image)

        if copied is not None:
            cells = self.races.bytes(copied[1], len(image))
            self.races.shared(w, copied[0], cells, None, False)
        self.races.global_(w, starts, len(image), None, write=True, unchanged=unchanged)

    def map_used(self, w: Warp, address: int) -> None:
        self.unused.map_used(w, address)
        self.tensor_maps.used(w, address)

    def map_fenced(self, w: Warp, address: PerLane | None) -> None:
        for each in [None] if address is None else dict.fromkeys(w.lane_values(address)):
            self.tensor_maps.fence(w, each)

    # -- asynchronous operations --------------------------------------------------------------

    def issued(self, w: Warp, work: Work) -> None:
        self.states.tickets[work] = ticket = self._ticket(w, work.stream)
        if work.releases:
            ticket.released = ticket.agent.release()

    def _ticket(self, w: Warp, stream: str) -> Ticket:
        """Return the ticket of an operation that a warp issues."""
        clock, mask = self.states.clocks[w], w.frag.mask
        if clock.open_loads:
            self.loads.before_signal(w)
        if stream == _TENSOR_CORE:
            self.manual.tensor_used(w)
        lane = mask.bit_length() - 1 if mask & (mask - 1) == 0 else ALL_LANES
        ticket = Ticket(clock, lane, w.at, stream)
        self.taint.issue(w, ticket)
        return ticket

    def step_began(self, work: Work) -> None:
        self.bounds.work = work

    def step_ended(self, work: Work) -> None:
        self.bounds.work = None
        if not work.steps:
            del self.states.tickets[work]

    def copies_committed(self, w: Warp) -> None:
        self.states.clocks[w].commit("cp.async")

    def fetch(self, work: Work, starts: np.ndarray, nbytes: int) -> None:
        ticket = self.states.tickets[work]
        self.races.global_rows(ticket, (starts, nbytes), ticket.position)

    def copy(
        self, work: Work, cta: Cta, offsets: np.ndarray, lanes: np.ndarray, nbytes: int
    ) -> None:
        ticket = self.states.tickets[work]
        cells = Scattered(offsets, nbytes, self.states.grain)
        self.taint.land(ticket, cta, cells)
        self.races.copy(ticket, cta, cells, lanes)

    def copies_arrival(self, work: Work, cta: Cta, barrier: MBarrier, *, lanes: int) -> None:
        ticket = self.states.tickets[work]
        self.lifetime.counted(ticket.site, barrier, lanes, lanes)
        self.announced.arrived(barrier, ticket.known.rows, unordered=ticket.own)
        self.edges.arrival_of(ticket, cta, barrier)

    def land(
        self,
        work: Work,
        places: list[Place],
        nbytes: int,
        signals: Signals,
        *,
        atomic: bool = False,
    ) -> None:
        self._land(self.states.tickets[work], places, nbytes, signals, atomic=atomic)

    def _land(
        self,
        ticket: Ticket,
        places: list[Place],
        nbytes: int,
        signals: Signals,
        unchanged: Unchanged | None = None,
        *,
        atomic: bool = False,
    ) -> tuple[int, int]:
        """Record that bytes landed, known to all waiters of the phase; return the last place's
        step."""
        step = (0, 0)
        if len(places) > 1 and len(signals) == 1 and not atomic:
            step = self.states.phases[signals[0]].position
            if self._surely_together(ticket, places, nbytes, step):
                places = []
        for number, place in enumerate(places):
            step = self.states.phases[signals[min(number, len(signals) - 1)]].position
            cells = self.races.bytes(place[1], nbytes)
            self.taint.land(ticket, place[0], cells)
            self.races.land(ticket, place[0], cells, step, unchanged, atomic=atomic)
        for barrier in signals:
            self.edges.signalled(ticket, barrier)
        return step

    def _surely_together(
        self, ticket: Ticket, places: list[Place], nbytes: int, step: tuple[int, int]
    ) -> bool:
        """Record that bytes landed at several places of a CTA, if they are ordered after all
        earlier accesses there; return False, with nothing recorded, if they may not be."""
        cta, grain = places[0][0], self.states.grain
        lows = np.array([low for other, low in places if other is cta])
        if len(lows) < len(places) or ((lows | nbytes) & grain - 1).any():
            return False
        cells = Scattered(lows, nbytes, grain)
        if not self.races.land_surely(ticket, cta, cells, step):
            return False
        self.taint.land(ticket, cta, cells)
        return True

    def load(
        self, work: Work, source: Rows, places: list[Place], nbytes: int, signals: Signals
    ) -> None:
        self._load(self.states.tickets[work], source, places, nbytes, signals)

    def loads_now(
        self, w: Warp, source: Rows, places: list[Place], nbytes: int, signals: Signals
    ) -> None:
        self._load(self._ticket(w, ""), source, places, nbytes, signals)

    def _load(
        self, ticket: Ticket, source: Rows, places: list[Place], nbytes: int, signals: Signals
    ) -> None:
        self.unused.copied(ticket.site, ticket.agent.cta, source[0])
        for cta, low in places:
            self.unused.lands(ticket.site, cta, self.races.bytes(low, nbytes))
        step = self._land(ticket, places, nbytes, signals)
        self.races.global_rows(ticket, source, step)

    def send(
        self,
        work: Work,
        source: Place,
        target: Place,
        nbytes: int,
        signal: MBarrier,
        *,
        atomic: bool = False,
    ) -> None:
        """CUTLASS's 01_gemm_split_k_fp16.py: each of four warps issues the same copy."""
        (cta, low), (other, offset) = source, target

        def unchanged(_: int) -> bool:
            held = other.smem[offset : offset + nbytes]
            return np.array_equal(held, cta.smem[low : low + nbytes])

        ticket = self.states.tickets[work]
        same = None if atomic else unchanged
        step = self._land(ticket, [target], nbytes, [signal], same, atomic=atomic)
        self.races.read_shared(ticket, cta, self.races.bytes(low, nbytes), step)
        self.taint.send(source, target, nbytes)

    def bulk_read(self, work: Work, cta: Cta, low: int, nbytes: int) -> None:
        ticket = self.states.tickets[work]
        self.races.read_shared(ticket, cta, self.races.bytes(low, nbytes), ticket.position)
        self.taint.bulk_read(ticket, cta, low, nbytes)

    def tile_read(self, work: Work, cta: Cta, tm: TensorMap, position: Position, low: int) -> None:
        ticket = self.states.tickets[work]
        self.races.read_shared(ticket, cta, self.races.bytes(low, tm.box_bytes), ticket.position)
        self.taint.tile_read(ticket, cta, tm, position, low)

    def bulk_write(
        self, work: Work, starts: np.ndarray, nbytes: int, *, atomic: bool = False
    ) -> None:
        self._store(work, (starts, nbytes), atomic=atomic)

    def tile_write(self, work: Work, tm: TensorMap, position: Position, image: np.ndarray) -> None:
        """CUTLASS's tma_load_store.py: four warps store one box."""
        rows = box_rows(tm, position)

        def unchanged(_: int) -> bool:
            return np.array_equal(self.memory.read_rows(*rows), inside(tm, position, image))

        self._store(work, rows, unchanged=unchanged)

    def tile_reduce(self, work: Work, tm: TensorMap, position: Position) -> None:
        self._store(work, box_rows(tm, position), atomic=True)

    def _store(
        self,
        work: Work,
        rows: Rows,
        *,
        atomic: bool = False,
        unchanged: Unchanged | None = None,
    ) -> None:
        ticket = self.states.tickets[work]
        step = (ticket.agent.stream("bulk write"), ticket.step)
        self.races.global_rows(ticket, rows, step, write=True, atomic=atomic, unchanged=unchanged)

    # -- tensor core and tensor memory --------------------------------------------------------

    def multiply(self, work: Work, ctas: Sequence[Cta], mma: Mma) -> None:
        self._multiply(self.states.tickets[work], ctas, mma)

    def multiplies_now(self, w: Warp, ctas: Sequence[Cta], mma: Mma) -> None:
        self._multiply(self._ticket(w, _TENSOR_CORE), ctas, mma)

    def _multiply(self, ticket: Ticket, ctas: Sequence[Cta], mma: Mma) -> None:
        product = footprints.product(mma, len(ctas), self.states.grain)
        self.unused.multiplies(ticket.site, ctas, mma, product)
        written = self.races.execute(ticket, ctas, product)
        self.taint.multiply(ticket, ctas, mma, product, written=written)

    def fill(
        self, work: Work, ctas: Sequence[Cta], address: int, desc: SmemDesc, shape: Fill
    ) -> None:
        self._fill(self.states.tickets[work], ctas, address, desc, shape)

    def fills_now(
        self, w: Warp, ctas: Sequence[Cta], address: int, desc: SmemDesc, shape: Fill
    ) -> None:
        self._fill(self._ticket(w, _TENSOR_CORE), ctas, address, desc, shape)

    def _fill(
        self, ticket: Ticket, ctas: Sequence[Cta], address: int, desc: SmemDesc, shape: Fill
    ) -> None:
        for cta in ctas:
            self.unused.fills(ticket.site, cta, footprints.filled_cells(address, shape))
        footprint = footprints.fill(desc, address, shape, self.states.grain)
        self.races.execute(ticket, ctas, footprint)
        self.taint.fill(ticket, ctas, address, desc, shape)

    def shift(self, work: Work, ctas: Sequence[Cta], address: int) -> None:
        self.races.shift(self.states.tickets[work], ctas, address)
        self.taint.shift(ctas, address)

    def commit_arrival(self, work: Work, cta: Cta, barrier: MBarrier) -> None:
        self._commit(self.states.tickets[work], cta, barrier)

    def commits_now(self, w: Warp, cta: Cta, barrier: MBarrier) -> None:
        self._commit(self._ticket(w, _TENSOR_CORE), cta, barrier)

    def _commit(self, ticket: Ticket, cta: Cta, barrier: MBarrier) -> None:
        self.announced.arrived(barrier, ticket.known.rows)
        self.edges.arrival_of(ticket, cta, barrier)

    def columns_allocated(self, w: Warp, column: int, count: int, pair: bool, told: int) -> None:
        self.loads.before_signal(w)
        self.races.columns(w, column, count, pair, told)
        self.taint.allocated(w, column, count, told)
        self.manual.allocated(w, pair)
        self.lifetime.allocated(w, column)

    def columns_freed(self, w: Warp, column: int, count: int, pair: bool) -> None:
        self.unused.freed(w.cta, column, count)
        self.loads.before_signal(w)
        self.races.columns(w, column, count, pair, None)

    def tensor_load(self, w: Warp, load: PendingLoad) -> None:
        cells = moved_cells(load.move, load.address, w.index & 3)
        self.taint.load(w, load.address, load.move, cells)
        if self._strict:
            self.manual.tensor_used(w)
        self.loads.issued(w, load, cells)

    def tensor_store(self, w: Warp, address: int, move: Move) -> None:
        cells = moved_cells(move, address, w.index & 3)
        self.taint.store(w, address, move, cells)
        if self._strict:
            self.manual.tensor_used(w)
        if self.states.clocks[w].open_loads:
            self.loads.before_signal(w)
        self.races.move(w, cells, True)

    def tensor_stores_waited(self, w: Warp) -> None:
        self.states.clocks[w].complete("tcgen05.st")


@lru_cache(maxsize=32)
def _padding(program: Program) -> Padding:
    return Padding(program.sites)


@lru_cache(maxsize=32)
def _of_text(program: Program) -> tuple[list[Finding], frozenset[int]]:
    """Return findings of a kernel's text, and the sites of waits whose result has no effect."""
    found: list[Finding] = []
    check_text(Findings(program.sites, found), program.entry)
    return found, unheeded(program.sites)
