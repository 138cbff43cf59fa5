"""Events of a launch, as calls of a listener.

A launch has a tuple of listeners, which is mostly empty: `for each in w.listeners: ...` then costs
no more than a test. Events that only generated code announces (`Lower.announce`) cost nothing.
An event with the name of an action precedes the action; an event in the past tense follows it.
Listeners change nothing that the kernel sees. A listener that follows undefined data may stop a
block with `UndefinedRead`; the block is then executed again.

w: the warp that acts; `w.at` is its instruction in a program that is `checked`.
cta: the CTA whose memory is accessed.
starts: byte offsets in shared memory or global addresses. There is one for all lanes if `lanes`
    is None, else one for each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ptxemu.numerics import PerLane

if TYPE_CHECKING:
    from ptxemu.machine.async_ops import Work
    from ptxemu.machine.fragment import Fragment
    from ptxemu.machine.mbarrier import MBarrier
    from ptxemu.machine.mma import Mma
    from ptxemu.machine.state import Cluster, Cta, Multiplication, NamedBarrier, Warp, Warpgroup
    from ptxemu.machine.tensor_map import TensorMap
    from ptxemu.machine.tmem import Move, PendingLoad
    from ptxemu.machine.tmem_fill import Fill
    from ptxemu.machine.umma_desc import SmemDesc

How = tuple[str, ...]  # semantics and scope of an mbarrier operation
Lanes = np.ndarray | None
Place = tuple["Cta", int]  # a byte offset in the shared memory of a CTA
Position = tuple[int, ...]  # coordinates of a box
Rows = tuple[np.ndarray, int]  # addresses, bytes of each
Signals = Sequence["MBarrier"]
Starts = int | np.ndarray
Waiters = list[tuple["Warp", "Fragment"]]


class Listener:
    """Hears of everything and does nothing."""

    every_block = False  # it needs each block as an event of its own, which is slower,
    every_access = True  # each access by a warp, also those that primitives could do,
    every_lane = False  # or each lane's part of an operation that lanes issue, and what it leaves
    immediate = False  # it needs no Work for an operation that completes when it is issued

    # -- beginnings and ends ------------------------------------------------------------------

    def cluster_started(self, cluster: Cluster) -> None: ...

    def cta_started(self, cta: Cta) -> None: ...

    def warp_started(self, w: Warp) -> None: ...

    def warp_ended(self, w: Warp) -> None: ...

    def cta_ended(self, cta: Cta) -> None: ...

    def block_began(self, w: Warp) -> None: ...

    def block_ended(self, w: Warp, instructions: int) -> None: ...

    def probed(self, w: Warp, number: int, registers: tuple[Any, ...]) -> None:
        """Called when `w` reaches a probe of `Program.probes`.

        registers: (name, types, values) of each register.
        """

    # -- accesses by a warp -------------------------------------------------------------------

    def shared_access(
        self, w: Warp, cta: Cta, starts: Starts, nbytes: int, lanes: Lanes, write: bool
    ) -> None: ...

    def global_read(self, w: Warp, starts: Starts, nbytes: int, lanes: Lanes) -> None: ...

    def global_write(
        self, w: Warp, starts: np.ndarray, size: int, values: np.ndarray, lanes: Lanes
    ) -> None:
        """values: [element of `size` bytes, start]."""

    def local_access(
        self, w: Warp, lanes: np.ndarray, elements: np.ndarray, size: int, write: bool
    ) -> None:
        """elements: [element of `size` bytes, lane]."""

    def atomic(self, w: Warp, space: str, name: str, address: Starts, size: int) -> None:
        """Before any lane has acted; each element is read and written as well."""

    # -- synchronisation ----------------------------------------------------------------------

    def mbarrier_replaced(self, w: Warp, barrier: MBarrier) -> None:
        """Called for mbarrier.init of an address that already has an mbarrier."""

    def mbarrier_initialised(self, w: Warp, cta: Cta, barrier: MBarrier) -> None: ...

    def mbarrier_arrival(
        self, w: Warp, cta: Cta, barrier: MBarrier, how: How, count: tuple[int, int] = (1, 1)
    ) -> None:
        """Called for arrivals; count: number of lanes, and of their arrivals."""

    def mbarrier_expected(self, w: Warp, cta: Cta, barrier: MBarrier, nbytes: int) -> None:
        """Called when all lanes announce bytes; negative for mbarrier.complete_tx, whose bytes have
        landed."""

    def mbarrier_waited(self, w: Warp, cta: Cta, barrier: MBarrier, parity: int, how: How) -> None:
        """Called when try_wait succeeds."""

    def mbarrier_tested(self, w: Warp, cta: Cta, barrier: MBarrier, parity: int, how: How) -> None:
        """Called when test_wait succeeds."""

    def mbarrier_signalled(self, barrier: MBarrier) -> None:
        """Called for arrivals or bytes of any agent."""

    def mbarrier_completed(self, barrier: MBarrier) -> None:
        """Called when a phase of `barrier` completes."""

    def barrier_arrival(self, w: Warp, barrier: NamedBarrier) -> None: ...

    def barrier_completed(self, barrier: NamedBarrier, waiters: Waiters) -> None: ...

    def barrier_waited(self, w: Warp, barrier: NamedBarrier) -> None: ...

    def cluster_arrival(self, w: Warp, relaxed: bool) -> None: ...

    def cluster_completed(self, cluster: Cluster) -> None: ...

    def cluster_waited(self, w: Warp) -> None: ...

    def warp_synced(self, w: Warp, members: PerLane) -> None:
        """bar.warp.sync. members: its mask, one for all lanes or one for each."""

    def lanes_named(self, w: Warp, members: PerLane) -> None:
        """Called with the mask of an instruction with .sync, unless the mask has all lanes.

        members: as for `warp_synced`.
        """

    def grid_waited(self, w: Warp) -> None: ...

    def fence(self, w: Warp, near: bool) -> None:
        """near: of scope .cta."""

    def fence_init(self, w: Warp) -> None: ...

    def fence_proxy(self, w: Warp, spaces: tuple[str, ...]) -> None: ...

    def fence_tensor(self, w: Warp, before: bool) -> None:
        """tcgen05.fence, ::before_thread_sync or ::after_thread_sync."""

    # -- tensor maps --------------------------------------------------------------------------

    def map_edited(self, w: Warp, place: Place) -> None:
        """tensormap.replace in shared memory."""

    def map_written(
        self, w: Warp, address: int, image: np.ndarray, copied: Place | None = None
    ) -> None:
        """The bytes `image` come to global memory: by tensormap.replace, or `copied` from shared
        memory by tensormap.cp_fenceproxy."""

    def map_fenced(self, w: Warp, address: PerLane | None) -> None:
        """fence.proxy.tensormap::generic, .acquire of an address, or .release."""

    def map_used(self, w: Warp, address: int) -> None:
        """Called when an instruction that reads a tensor map is issued; the map is read then."""

    # -- asynchronous operations --------------------------------------------------------------

    def issued(self, w: Warp, work: Work) -> None: ...

    def step_began(self, work: Work) -> None: ...

    def step_ended(self, work: Work) -> None: ...

    def copies_committed(self, w: Warp) -> None:
        """cp.async.commit_group."""

    def copies_waited(self, w: Warp, allowed: int | None) -> None:
        """Called after a wait for all groups but the newest `allowed`; None: for all copies."""

    def bulk_committed(self, w: Warp) -> None: ...

    def bulk_waited(self, w: Warp, allowed: int, read: bool) -> None: ...

    def fetch(self, work: Work, starts: np.ndarray, nbytes: int) -> None:
        """Called when cp.async reads global memory."""

    def copy(
        self, work: Work, cta: Cta, offsets: np.ndarray, lanes: np.ndarray, nbytes: int
    ) -> None:
        """Called when cp.async writes shared memory."""

    def copies_arrival(self, work: Work, cta: Cta, barrier: MBarrier, *, lanes: int) -> None:
        """cp.async.mbarrier.arrive, for each lane; lanes: how many are still to arrive there."""

    def land(
        self,
        work: Work,
        places: list[Place],
        nbytes: int,
        signals: Signals,
        *,
        atomic: bool = False,
    ) -> None:
        """Called when bytes come to shared memory and complete on mbarriers.

        signals: one mbarrier for all places, or one for each.
        atomic: whether the bytes are combined with what is there.
        """

    def load(
        self, work: Work, source: Rows, places: list[Place], nbytes: int, signals: Signals
    ) -> None:
        """Called when bytes of global memory come to shared memory and complete on mbarriers."""

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
        """Called when bytes of shared memory come to shared memory and complete on an mbarrier.

        atomic: whether they are combined with what is there.
        """

    def bulk_read(self, work: Work, cta: Cta, low: int, nbytes: int) -> None:
        """Called when a bulk store or reduction reads its source bytes."""

    def tile_read(
        self, work: Work, cta: Cta, tm: TensorMap, position: Position, low: int
    ) -> None: ...

    def bulk_write(
        self, work: Work, starts: np.ndarray, nbytes: int, *, atomic: bool = False
    ) -> None:
        """Called when a bulk store or reduction writes its destination."""

    def tile_write(
        self, work: Work, tm: TensorMap, position: Position, image: np.ndarray
    ) -> None: ...

    def tile_reduce(self, work: Work, tm: TensorMap, position: Position) -> None: ...

    def tile_loaded(
        self, work: Work, tm: TensorMap, position: Position, places: list[Place]
    ) -> None:
        """Called when a loaded box is in shared memory."""

    # -- warpgroups ---------------------------------------------------------------------------

    def warpgroup_joined(self, w: Warp, group: Warpgroup, number: int) -> None:
        """Called when a warp executes wgmma.mma_async, operation `number` of its warpgroup."""

    def warpgroup_multiply(self, what: Multiplication) -> None:
        """Called when the operation runs, after all warps of the group have executed it."""

    def warpgroup_waited(self, w: Warp, group: Warpgroup, last: int) -> None:
        """Called when wgmma.wait_group returns: operations up to `last` are complete."""

    def accumulator_used(self, w: Warp, what: Multiplication) -> None:
        """Called when `w` reads a register that an operation it has not waited for will write."""

    # -- asynchronous operations that complete when they are issued --------------------------
    #
    # One call each instead of `issued`, `step_began`, the event itself and `step_ended`.

    def loads_now(
        self, w: Warp, source: Rows, places: list[Place], nbytes: int, signals: Signals
    ) -> None:
        """`load`, of rows that the launch may read."""

    def multiplies_now(self, w: Warp, ctas: Sequence[Cta], mma: Mma) -> None: ...

    def fills_now(
        self, w: Warp, ctas: Sequence[Cta], address: int, desc: SmemDesc, shape: Fill
    ) -> None: ...

    def commits_now(self, w: Warp, cta: Cta, barrier: MBarrier) -> None:
        """`commit_arrival`, of the only arrival of a commit."""

    # -- tensor core and tensor memory --------------------------------------------------------

    def multiply(self, work: Work, ctas: Sequence[Cta], mma: Mma) -> None: ...

    def fill(
        self, work: Work, ctas: Sequence[Cta], address: int, desc: SmemDesc, shape: Fill
    ) -> None:
        """tcgen05.cp."""

    def shift(self, work: Work, ctas: Sequence[Cta], address: int) -> None:
        """tcgen05.shift."""

    def commit_arrival(self, work: Work, cta: Cta, barrier: MBarrier) -> None: ...

    def columns_allocated(self, w: Warp, column: int, count: int, pair: bool, told: int) -> None:
        """Called when columns are allocated.

        told: offset in shared memory that their address was written to.
        """

    def columns_freed(self, w: Warp, column: int, count: int, pair: bool) -> None: ...

    def tensor_load(self, w: Warp, load: PendingLoad) -> None:
        """Called when a tcgen05.ld is issued."""

    def tensor_used(self, w: Warp, load: PendingLoad) -> None:
        """Called at the first use of a register that comes before a wait for the load."""

    def tensor_loads_waited(self, w: Warp) -> None:
        """Called at tcgen05.wait::ld."""

    def tensor_store(self, w: Warp, address: int, move: Move) -> None: ...

    def tensor_stores_waited(self, w: Warp) -> None: ...
