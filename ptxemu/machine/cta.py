"""A CTA and its cluster: shared memory, tensor memory, mbarriers, named and cluster barriers.

A shared address as a kernel sees it is (rank in cluster) << 24 | offset; offsets index `smem`,
whose first KiB is the system's. Everything starts poisoned. Under the adversarial policy `unfenced`
marks the bytes written by ordinary stores and not yet fenced towards the async proxy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ptxemu.errors import HardwareRefusal, OutOfBounds
from ptxemu.machine.async_ops import WorkQueue
from ptxemu.machine.listener import Waiters
from ptxemu.machine.mbarrier import MBarrier
from ptxemu.machine.memory import views_of
from ptxemu.machine.tmem import Tmem
from ptxemu.native.memory import Context
from ptxemu.report import NOTE, Finding

if TYPE_CHECKING:
    from ptxemu.machine.machine import Machine
    from ptxemu.machine.warp import Warp
    from ptxemu.machine.warpgroup import Warpgroup

RANK_SHIFT = 24
OFFSET_MASK = (1 << RANK_SHIFT) - 1
POISON_BYTE = 0xFF
WARP_LANES = 32
REGISTER_FILE = 65_536  # of an SM
MAX_REGISTERS = 256  # of a thread, as ptxas allots them
MAX_NAMED_BARRIERS = 16


@dataclass(eq=False, slots=True)
class NamedBarrier:
    """bar / barrier.cta: counts threads, warp by warp. A count of 0 stands for every thread of the
    CTA that has not exited."""

    cta: Cta
    ident: int
    count: int = 0
    arrived: int = 0
    # bar.red: threads whose predicate holds, threads that have one
    votes: list[int] = field(default_factory=lambda: [0, 0])
    result: tuple[int, ...] = (0, 0)  # the votes of the phase that completed last
    waiters: Waiters = field(default_factory=list)
    agents: list[str] = field(default_factory=list)  # the warps that have arrived

    def __str__(self) -> str:
        """In a deadlock report, what is parked here waits for."""
        of = f"barrier {self.ident} of {self.cta.name()}"
        return f"{of}: {self.arrived} of {self.expected()} threads arrived"

    def vote(self, true: int, threads: int) -> None:
        """bar.red: the predicates of threads that are about to arrive."""
        self.votes = [self.votes[0] + true, self.votes[1] + threads]

    def add(self, threads: int, count: int, by: str = "") -> bool:
        """Count an arrival of a warp; True when it completes the barrier."""
        if self.arrived and self.count != count:
            raise HardwareRefusal(
                f"barrier {self.ident}: {count} threads expected here, {self.count} by "
                "those that arrived before"
            )
        self.count = count
        self.arrived += threads
        self.agents.append(by)
        if self.arrived > self.expected():
            raise HardwareRefusal(
                f"barrier {self.ident}: {self.arrived} threads arrived, {self.expected()} expected"
            )
        return self.complete_if_all()

    def expected(self) -> int:
        return self.count or 32 * self.cta.live_warps

    def complete_if_all(self) -> bool:
        """Wake the waiters if everyone expected has arrived."""
        if not self.arrived or self.arrived < self.expected():
            return False
        self.arrived = 0
        self.agents = []
        self.result, self.votes = tuple(self.votes), [0, 0]
        waiters, self.waiters = self.waiters, []
        for each in self.cta.machine.listeners:
            each.barrier_completed(self, waiters)
        for warp, fragment in waiters:
            warp.wake(fragment, token=self.result)
        return True


class Cta:
    """One CTA. `views` are typed views of `smem` by element size in bytes."""

    def __init__(
        self,
        machine: Machine,
        cluster: Cluster,
        ctaid: tuple[int, int, int],
        rank: int,
        smem_bytes: int,
    ) -> None:
        self.machine = machine
        self.cluster = cluster
        self.ctaid = ctaid
        self._name = f"cta {ctaid}".replace(" ", "")
        self.rank = rank
        self.smem_size = smem_bytes
        room = -(-smem_bytes // 1024) * 1024
        raw = np.full(room + 1024, POISON_BYTE, np.uint8)
        start = -raw.ctypes.data % 1024
        self.smem = raw[start : start + room]
        self.views = views_of(self.smem)
        self.unfenced = np.zeros(room, np.bool_) if machine.late else None
        self.any_unfenced = False
        self.tmem = Tmem(machine.find)
        self.tmem_waiters: Waiters = []
        self.tensor_pipe = WorkQueue()
        self.mbarriers: dict[int, MBarrier] = {}
        self.barriers: dict[int, NamedBarrier] = {}
        self.warps: list[Warp] = []
        self.warpgroups: dict[int, Warpgroup] = {}  # by first warp, where wgmma has come
        self.live_warps = 0
        self._places: tuple[int, int, int] | None = None  # addresses of its memories

    def context(self, warp: int) -> Context:
        """What primitives know when the warp of that index executes them."""
        if self._places is None:
            cells, columns = self.tmem.cells.ctypes.data, self.tmem.columns.ctypes.data
            self._places = self.smem.ctypes.data, cells, columns
        return Context(
            *self._places,
            self.smem_size,
            self.machine.memory.table,
            32 * (warp % 4),
            refuses=self.unfenced is not None
            or self.machine.every_access is not self.machine.program.checked,
        )

    def name(self) -> str:
        return self._name

    def mbarrier(self, offset: int) -> MBarrier:
        found = self.mbarriers.get(offset)
        if found is None:
            raise HardwareRefusal(
                f"no mbarrier was initialised at shared offset {offset:#x} of {self.name()}"
            )
        return found

    def init_mbarrier(self, offset: int, count: int, site: int = -1) -> None:
        if offset % 8:
            raise HardwareRefusal(f"mbarrier at shared offset {offset:#x}; must be 8-byte aligned")
        self.check(offset, 8)
        old = self.mbarriers.get(offset)
        if old is not None and old.waiters:
            raise HardwareRefusal(f"{old.describe()} is initialised again while warps wait on it")
        self.mbarriers[offset] = MBarrier(
            f"{offset:#x} of {self.name()}",
            count,
            self.machine.listeners,
            self.machine.units,
            site,
        )

    def barrier(self, ident: int) -> NamedBarrier:
        if not 0 <= ident < MAX_NAMED_BARRIERS:
            raise HardwareRefusal(f"barrier {ident}; must be 0..{MAX_NAMED_BARRIERS - 1}")
        if ident not in self.barriers:
            self.barriers[ident] = NamedBarrier(self, ident)
        return self.barriers[ident]

    def check(self, offset: int, nbytes: int) -> None:
        """[offset, offset + nbytes) must lie in this CTA's shared memory."""
        if offset < 0 or offset + nbytes > self.smem_size:
            raise OutOfBounds(
                f"shared access of {nbytes} bytes at offset {offset:#x}; {self.name()} has "
                f"{self.smem_size} bytes ({self.smem_size:#x})"
            )

    def check_warpgroups(self) -> None:
        """The manual wants setmaxnreg executed alike by all four warps of a warpgroup.
        FlashAttention-4's backward pass and CUTLASS's mixed_input_gemm, right on hardware, give
        counts of their own to single warps: a note. So does CUTLASS's GEMM for GeForce to its
        fifth warp, the only one of its warpgroup. The manual wants wgmma executed by all four, too,
        and nothing comes of one that is not."""
        for group in self.warpgroups.values():
            group.require_whole()
        self.check_register_pool()
        if not self.machine.options.strict:
            return
        for first in range(0, len(self.warps), 4):
            asked = {w.index: w.register_counts[-1:] for w in self.warps[first : first + 4]}
            if len(asked) < 4 and any(asked.values()):
                text = f"setmaxnreg in a warpgroup of {len(asked)} warps, not 4"
                self.machine.report(Finding("setmaxnreg", text, NOTE, rule="setmaxnreg"))
            if len({tuple(counts) for counts in asked.values()}) > 1:
                text = f"setmaxnreg differs within a warpgroup, last count by warp: {asked}"
                self.machine.report(Finding("setmaxnreg", text, NOTE, rule="setmaxnreg"))

    def check_register_pool(self) -> None:
        """A warp that asks for registers waits until others have given them back, and all there are
        is what the launch took: of the file an equal part for each thread, a multiple of eight. An
        H200 waits for ever where the counts add up to more (notes/log.md, 2026-11-26)."""
        counts = [warp.register_counts[-1] for warp in self.warps if warp.register_counts]
        threads = len(self.warps) * WARP_LANES
        at_launch = min(MAX_REGISTERS, REGISTER_FILE // threads // 8 * 8)
        asked, taken = sum(counts) * WARP_LANES, at_launch * threads
        if asked > taken:
            text = (
                f"setmaxnreg asks for {asked} registers in all; a launch of {threads} threads "
                f"takes {taken} at most, {at_launch} for each, and who waits for more never ends"
            )
            self.machine.report(Finding("setmaxnreg", text, rule="setmaxnreg"))

    def reached_by(self, issuer: Cta | None) -> None:
        """Shared memory, barriers and tensor memory of a CTA end with it: what its peers issue has
        to arrive before its exit (CUDA C++ Programming Guide, "Distributed Shared Memory")."""
        if self.live_warps == 0 and self is not issuer:
            text = "a CTA of a cluster is reached by its peer after all its threads have exited"
            self.machine.find("exited", text)

    def mark_generic(self, written: slice | np.ndarray) -> None:
        """An ordinary store wrote these bytes: the async proxy does not see them before a fence."""
        if self.unfenced is not None:
            self.unfenced[written] = True
            self.any_unfenced = True

    def mark_async(self, written: slice | np.ndarray) -> None:
        """The async proxy itself wrote these bytes."""
        if self.any_unfenced and self.unfenced is not None:
            self.unfenced[written] = False

    def fence_async(self) -> None:
        """fence.proxy.async: ordinary stores made before become visible to the async proxy."""
        if self.any_unfenced and self.unfenced is not None:
            self.unfenced[:] = False
            self.any_unfenced = False

    def as_seen_by_async(self, low: int = 0, high: int | None = None) -> np.ndarray:
        """Shared memory as the async proxy sees it: unfenced bytes are poison (a copy if any)."""
        if not self.any_unfenced or self.unfenced is None or not self.unfenced[low:high].any():
            return self.smem
        seen = self.smem.copy()
        seen[self.unfenced] = POISON_BYTE
        return seen


class AsyncView:
    """A CTA as tcgen05 sees it: tensor memory as it is, shared memory through the async proxy."""

    __slots__ = ("smem", "tmem")

    def __init__(self, cta: Cta) -> None:
        self.smem = cta.as_seen_by_async()
        self.tmem = cta.tmem


@dataclass(eq=False)
class Cluster:
    """The CTAs launched together, and their barrier; one CTA in a launch without clusters."""

    machine: Machine
    index: int
    shape: tuple[int, int, int]
    ctas: list[Cta] = field(default_factory=list)
    arrived: int = 0
    phase: int = 0
    waiters: Waiters = field(default_factory=list)

    def __str__(self) -> str:
        return f"the cluster barrier: {self.arrived} of {self.live_threads()} threads arrived"

    def cta(self, rank: int) -> Cta:
        if not 0 <= rank < len(self.ctas):
            raise OutOfBounds(
                f"shared address of rank {rank} in a cluster of {len(self.ctas)} CTAs"
            )
        found = self.ctas[rank]
        if found.live_warps == 0:
            found.reached_by(None)  # by an instruction of a CTA that is running
        return found

    def locate(self, address: int) -> tuple[Cta, int]:
        """A shared::cluster address -> (CTA, offset)."""
        return self.cta(address >> RANK_SHIFT), address & OFFSET_MASK

    def mbarrier(self, address: int) -> MBarrier:
        cta, offset = self.locate(address)
        return cta.mbarrier(offset)

    def live_threads(self) -> int:
        return sum(warp.live.bit_count() for cta in self.ctas for warp in cta.warps)

    def arrive(self, threads: int) -> None:
        """barrier.cluster.arrive by `threads` threads."""
        self.arrived += threads
        self.complete_if_all()

    def complete_if_all(self) -> None:
        """The phase completes when every thread that has not exited has arrived."""
        if self.arrived and self.arrived >= self.live_threads():
            self.arrived = 0
            self.phase += 1
            for each in self.machine.listeners:
                each.cluster_completed(self)
            self.machine.note_progress()
            waiters, self.waiters = self.waiters, []
            for warp, fragment in waiters:
                warp.wake(fragment)
