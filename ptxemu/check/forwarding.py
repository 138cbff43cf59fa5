"""Events that concern one part of the checker alone, each sent to it."""

from __future__ import annotations

import numpy as np

from ptxemu.check.edges import Edges
from ptxemu.check.lifetime import Lifetime
from ptxemu.check.manual import Manual
from ptxemu.check.state import States
from ptxemu.check.taint_memory import Taint
from ptxemu.check.tensor_loads import TensorLoads
from ptxemu.check.wgmma import Warpgroups
from ptxemu.machine.fragment import Waiters
from ptxemu.machine.listener import How, Listener, Starts
from ptxemu.machine.mbarrier import MBarrier
from ptxemu.machine.state import Cluster, Cta, Multiplication, NamedBarrier, Warp, Warpgroup
from ptxemu.machine.tmem import PendingLoad


class Forwarding(Listener):
    """The parts, which `checker.Checker` makes."""

    states: States
    lifetime: Lifetime
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
