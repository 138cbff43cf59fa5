"""What the checker keeps of each object of the machine, by that object."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ptxemu.check.agents import Ticket, WarpClock
from ptxemu.check.clocks import Components, join
from ptxemu.check.footprints import TENSOR_CELLS
from ptxemu.check.phases import PhaseClock
from ptxemu.check.shadow import Shadow
from ptxemu.check.undefined import SharedCodes, TensorCodes
from ptxemu.machine.async_ops import Work
from ptxemu.machine.mbarrier import MBarrier
from ptxemu.machine.state import Cluster, Cta, NamedBarrier, Warp, Warpgroup

MBARRIER_BYTES = 8


@dataclass(eq=False, kw_only=True)
class _Arrivals:
    """told: what those of this phase of a barrier tell."""

    told: np.ndarray | None = None

    def add(self, told: np.ndarray) -> None:
        self.told = told if self.told is None else join(self.told, told)


@dataclass(eq=False)
class ClusterState(_Arrivals):
    """grid_before: the component of the launch before. phases: of the cluster's barrier, what those
    that are complete told."""

    components: Components
    grid_before: int
    phases: list[np.ndarray | None] = field(default_factory=list)


@dataclass(eq=False)
class BarrierState(_Arrivals):
    """Of a named barrier: its component, complete phases."""

    component: int = 0
    phases: int = 0


class CtaState:
    """Who touched its memories, and which undefined data they hold."""

    def __init__(self, cta: Cta, grain: int) -> None:
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


class States:
    """Of one launch. grain: bytes of a cell of shared memory."""

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

    def start_warp(self, w: Warp) -> None:
        self.clocks[w] = WarpClock(self.components(w.cta), w)

    def mbarrier_initialised(self, w: Warp, cta: Cta, barrier: MBarrier) -> None:
        clock = self.clocks[w]
        phases = PhaseClock(self.components(cta), f"mbarrier {barrier.where}")
        phases.initialised = (clock.own, clock.now)
        phases.init_site = w.at
        self.phases[barrier] = phases
        first = int(barrier.where.partition(" ")[0], 16) // self.grain
        self.ctas[cta].shared.with_barriers()[first : first + MBARRIER_BYTES // self.grain] = True

    def barrier(self, barrier: NamedBarrier) -> BarrierState:
        return self.barriers.setdefault(barrier, BarrierState())

    def components(self, cta: Cta) -> Components:
        return self.clusters[cta.cluster.index].components
