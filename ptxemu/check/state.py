"""State of the checker for each object of the machine, and clocks of mbarriers."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np

from ptxemu.check import frame
from ptxemu.check.agents import Ticket, WarpClock
from ptxemu.check.clocks import (
    ALL_LANES,
    COMPONENT_SHIFT,
    EXECUTED,
    LANE_SHIFT,
    ORDERED,
    STEP_SHIFT,
    Components,
    fresh,
    join,
)
from ptxemu.check.footprints import TENSOR_CELLS, Footprint
from ptxemu.check.shadow import Shadow
from ptxemu.check.undefined import SharedCodes, TensorCodes
from ptxemu.machine.async_ops import Work
from ptxemu.machine.fragment import not_told
from ptxemu.machine.mbarrier import MBarrier
from ptxemu.machine.state import Cluster, Cta, NamedBarrier, Warp, Warpgroup
from ptxemu.native.shadow import IN_TENSOR, WRITES


class PhaseClock:
    """Knowledge that the phases of an mbarrier publish. Phase n is step n + 1 of its component."""

    def __init__(self, components: Components, agent: str) -> None:
        self.components = components
        self.agent = agent
        self.component = components.add("mbarrier", agent)
        self._gathered: np.ndarray | None = None  # a clock, once something is told
        self._near: np.ndarray | None = None  # the same without `far` arrivals, once there is one
        self._latest: np.ndarray | None = None  # what was told last,
        self._reached: dict[int, int] = {}  # and besides steps, by component
        self._unknown = -1  # component of an arrival that a waiter did not know of
        self.phases: list[np.ndarray] = []
        self._near_phases: dict[int, np.ndarray] = {}  # those that differ from `phases`
        self.landing = False  # bytes are part of the current phase, and of which others they were
        self.with_bytes: list[bool] = []
        self.from_peers = False  # some arrival was of another CTA
        self.initialised = (0, 0)  # component and step of its mbarrier.init
        self.init_site = 0

    @property
    def position(self) -> tuple[int, int]:
        """Component and step of the current phase."""
        return self.component, len(self.phases) + 1

    @property
    def gathered(self) -> np.ndarray:
        """Knowledge that the arrivals of all phases have published so far."""
        if self._gathered is None:
            self._gathered = fresh(self.components)
        return self._gathered

    def arrive(self, told: np.ndarray, *, far: bool = False) -> None:
        """Add what an arrival publishes; far: by a thread of another CTA, not by its copies."""
        if far and self._near is None:
            self._near = self.gathered.copy()
        if told is not self._latest:
            if self._near is not None and not far:
                self._near = join(self._near, told)
            self._gathered, self._latest = join(self.gathered, told), told

    def arrive_with(self, ticket: Ticket) -> None:
        """Publish the completion of an operation.

        It publishes all that its warp knew at issue: between two ordinary accesses, the proxy that
        established the order does not matter ("Proxy-preserved Base Causality Order"). For an
        in-order unit it also publishes that all operations up to this one are complete.
        """
        self.arrive(ticket.known.told())
        if ticket.component and self._reached.get(ticket.component, 0) < ticket.step:
            self._reached[ticket.component] = ticket.step

    def completed(self) -> None:
        self._gathered = told = self._with_reached(self.gathered)
        if self._near is not None:
            self._near = self._with_reached(self._near)
            self._near_phases[len(self.phases)] = self._near.copy()
        self._reached.clear()
        self.phases.append(told.copy())
        self.with_bytes.append(self.landing)
        self.landing = False

    def _with_reached(self, told: np.ndarray) -> np.ndarray:
        """Add the steps of units that the phase has reached, and the phase itself."""
        if max(self.component, 0, *self._reached) >= told.shape[1]:
            told = join(told, fresh(self.components))
        for component, step in self._reached.items():
            for row in (EXECUTED, ORDERED):
                told[row, component] = max(told[row, component], step)
        told[EXECUTED, self.component] = told[ORDERED, self.component] = len(self.phases) + 1
        return told

    def told(self, by: WarpClock, parity: int) -> int | None:
        """Return the phase that a successful wait is sure to observe in any schedule.

        It has this parity and is later than those known to `by`. None if a known phase has it.
        """
        rows, component, complete = by.rows, self.component, len(self.phases)
        known = rows.item(EXECUTED, component) if component < rows.shape[1] else 0
        while known < complete and not self.with_bytes[known] and self._made_by_known(known, by):
            known += 1
        phase = known if (known & 1) != parity else known + 1
        return min(phase, complete) - 1 if phase else None

    def near(self, phase: int) -> np.ndarray:
        """Return what a phase gives a wait of scope .cta: nothing of threads of other CTAs."""
        return self._near_phases.get(phase, self.phases[phase])

    def _made_by_known(self, phase: int, by: WarpClock) -> bool:
        """Whether `by` knows of all arrivals of a phase without bytes, hence of its completion: in
        CUTLASS's tma_pipeline_warpspec.py the producer itself has arrived at the empty barriers
        first."""
        told, known, first = self.phases[phase], by.rows, self._unknown
        both = min(told.shape[1], known.shape[1])
        if 0 <= first < both and told.item(EXECUTED, first) > known.item(EXECUTED, first):
            return False  # as nearly always
        told, known = told[EXECUTED], known[EXECUTED]
        lacks = told[:both] > known[:both]
        if self.component < both:
            lacks[self.component] = False
        if lacks.any():
            self._unknown = int(lacks.argmax())
            return False
        return not np.count_nonzero(told[both:])


MBARRIER_BYTES = 8
_NO_LANE = ALL_LANES << LANE_SHIFT


@dataclass(eq=False, kw_only=True)
class _Arrivals:
    """Arrivals of a barrier's phase. told: what they publish."""

    told: np.ndarray | None = None

    def add(self, told: np.ndarray) -> None:
        self.told = told if self.told is None else join(self.told, told)


@dataclass(eq=False)
class ClusterState(_Arrivals):
    """State of a cluster.

    Attributes:
        grid_before: Component of the previous launch.
        phases: Knowledge published by each complete phase of the cluster's barrier.
    """

    components: Components
    grid_before: int
    phases: list[np.ndarray | None] = field(default_factory=list)


@dataclass(eq=False)
class BarrierState(_Arrivals):
    """State of a named barrier.

    Attributes:
        component: Its component.
        phases: Number of its complete phases.
        heard: What those that arrived in this phase know from relaxed accesses without a fence, by
            cluster.
    """

    component: int = 0
    phases: int = 0
    heard: list[dict[int, np.ndarray]] = field(default_factory=list)


class CtaState:
    """State of a CTA: the accesses to its memories, and their undefined data."""

    def __init__(self, cta: Cta, grain: int) -> None:
        self._routines = frame.routines()
        self.shared = Shadow(len(cta.smem) // grain, "shared")
        self.tensor = Shadow(TENSOR_CELLS, "tensor")
        self.shared_codes = SharedCodes(self.shared.last, grain)
        self.tensor_codes = TensorCodes()
        self.allocations: int | None = None  # the component of its tcgen05.alloc and .dealloc
        self.allocated = 0  # how many it has executed
        # component -> the last step of it that touches this CTA, and site
        self.reached_until: dict[int, tuple[int, int]] = {}
        self.known_at_end: np.ndarray | None = None
        self.ended = False
        # For `visit_all`: words and their address; `readers` of the memories that it reads.
        self._accesses: dict[Footprint, tuple[array[int], int, list[dict[int, None]]]] = {}

    def surely(self, footprint: Footprint, ticket: Ticket) -> tuple[int, int]:
        """Record accesses of an operation, while each is ordered after all it depends on.

        Returns how many were, and 1 if what they read of shared memory had not all been written.
        """
        routines, shared, tensor = self._routines, self.shared, self.tensor
        if routines is None or shared.below is not None or tensor.below is not None:
            return 0, 0
        found = self._accesses.get(footprint)
        if found is None:
            words: list[int] = []
            for cells, of_tensor, write in footprint.accesses:
                kind = IN_TENSOR * of_tensor | WRITES * write
                words += (tensor if of_tensor else shared).at, cells.at, kind
            table, at = frame.words(*words)
            of_reads = {of_tensor for _, of_tensor, write in footprint.accesses if not write}
            readers = [(tensor if of_tensor else shared).readers for of_tensor in of_reads]
            found = self._accesses[footprint] = table, at, readers
        component, known = ticket.component, ticket.known.tables
        done = routines.visit_all(
            found[1],
            len(footprint.accesses),
            known.get("shared") or ticket.at("shared"),
            known.get("tensor") or ticket.at("tensor"),
            *ticket.in_order,
            component << COMPONENT_SHIFT | ticket.step << STEP_SHIFT | _NO_LANE | ticket.site,
            ticket.lane,
        )
        for each in found[2]:  # a read that is not done becomes one in the detailed check
            each[component] = None
        return done >> 1, done & 1


class States:
    """States of one launch. grain: bytes per cell of shared memory."""

    def __init__(self, grain: int) -> None:
        self.grain = grain
        self.clusters: dict[int, ClusterState] = {}  # by index
        self.ctas: dict[Cta, CtaState] = {}
        self.clocks: dict[Warp, WarpClock] = {}
        self.phases: dict[MBarrier, PhaseClock] = {}
        self.barriers: dict[NamedBarrier, BarrierState] = {}
        self.tickets: dict[Work, Ticket] = {}  # of outstanding work
        # by index of the cluster and component
        self.warpgroups: dict[tuple[int, int], Warpgroup] = {}
        self.has_waited = False  # a warp for the grids before, by griddepcontrol.wait

    def cluster_started(self, cluster: Cluster) -> None:
        components = Components()
        before = components.add("grid", "the launch before")
        self.clusters[cluster.index] = ClusterState(components, before)

    def cta_started(self, cta: Cta) -> None:
        self.ctas[cta] = CtaState(cta, self.grain)

    def cta_ended(self, cta: Cta) -> None:
        """Give back the shadows of a cluster that has ended, if none of its work is outstanding."""
        ctas = [self.ctas[each] for each in cta.cluster.ctas]
        working = (ticket.agent.cta.cluster for ticket in self.tickets.values())
        if all(each.ended for each in ctas) and cta.cluster not in working:
            for each in ctas:
                each.shared.give_back()
                each.tensor.give_back()
                each.tensor_codes.give_back()

    def forget(self) -> None:
        """The launch has ended well, and nobody looks at its objects again: break their circles.

        Else they would be the garbage collector's, which is slower than all that made them.
        """
        for w, clock in self.clocks.items():
            w.told, w.follower, w.listeners, w.immediate = not_told, None, (), None
            clock.components.known.clear()
        for cta in self.ctas:
            cta.cluster.ctas.clear()
            cta.warps.clear()
            cta.barriers.clear()
            cta.mbarriers.clear()
        for barrier in self.phases:
            barrier.listeners = ()
        for states in (self.clocks, self.ctas, self.phases, self.barriers, self.clusters):
            states.clear()

    def start_warp(self, w: Warp) -> None:
        self.clocks[w] = WarpClock(self.components(w.cta), w)

    def mbarrier_initialised(self, w: Warp, cta: Cta, barrier: MBarrier) -> None:
        clock = self.clocks[w]
        phases = PhaseClock(self.components(cta), f"mbarrier {barrier.where}")
        phases.initialised = (clock.own, clock.now)
        phases.init_site = w.at
        self.phases[barrier] = phases
        first = barrier.offset // self.grain
        self.ctas[cta].shared.with_barriers()[first : first + MBARRIER_BYTES // self.grain] = True

    def barrier(self, barrier: NamedBarrier) -> BarrierState:
        return self.barriers.setdefault(barrier, BarrierState())

    def components(self, cta: Cta) -> Components:
        return self.clusters[cta.cluster.index].components
