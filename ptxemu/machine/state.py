"""State of a running cluster: its CTAs, their warps and warpgroups, named and cluster barriers.

CTA. A shared address as a kernel sees it is (rank in cluster) << 24 | offset; offsets index `smem`,
whose first KiB is the system's. Everything starts poisoned. Under the adversarial policy `unfenced`
marks the bytes written by ordinary stores and not yet fenced towards the async proxy.

Warp. A branch that differs between lanes splits a fragment (lanes at one place) in two; the
runnable fragment at the lowest block runs first; fragments that meet at a block merge. A block that
needs the lanes together (`.sync`, `.aligned` instructions) waits for the fragments that hold the
others. A waiting fragment lets its siblings run, as on hardware since Volta.
"""

from __future__ import annotations

import builtins
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Protocol

import numpy as np

from ptxemu.codegen.namespace import bits_mask, get
from ptxemu.codegen.program import ELECTED, EXITED, PARKED, Program
from ptxemu.codegen.tainted import Follower
from ptxemu.errors import HardwareRefusal, OutOfBounds
from ptxemu.findings import NOTE, Finding
from ptxemu.machine.async_ops import AsyncUnits, BulkGroups, Work, WorkQueue
from ptxemu.machine.fragment import ALL, Fragment, Waiters, lanes_of, not_told, thread_numbers
from ptxemu.machine.mbarrier import MBarrier
from ptxemu.machine.memory import GlobalMemory, views_of
from ptxemu.machine.shape import Shape, register_count_known
from ptxemu.machine.tmem import Move, PendingLoad, Tmem
from ptxemu.machine.wgmma import Form
from ptxemu.native.memory import Context
from ptxemu.numerics import PerLane
from ptxemu.options import Options
from ptxemu.syntax.tree import Imm, Reg

RANK_SHIFT = 24
OFFSET_MASK = (1 << RANK_SHIFT) - 1
POISON_BYTE = 0xFF
WARP_LANES = 32
REGISTER_FILE = 65_536  # of an SM
MAX_REGISTERS = 256  # of a thread, as ptxas allots them
MAX_NAMED_BARRIERS = 16
SPLIT = -3  # the fragment branched both ways
_FAIRNESS = 128  # blocks of parted lanes after which those behind have a turn
_LONG = 50  # blocks of a turn in which one more does not count
_PLACE = attrgetter("pc")
_FIRST, _OTHERS = bits_mask(1), ALL & ~1  # of a whole warp: the elected lane, and the others
WARPS = 4
Registers = tuple[Any, ...]  # each 32 lanes, or the bits that all of them have
Operands = tuple[Form, int, Any, int, bool]  # form, line, A's descriptor or None, B's, scale-d


class Launch(Protocol):
    """Interface of a running launch for its CTAs and warps, see `ptxemu.machine.machine.Machine`.

    listeners: `ptxemu.machine.listener.Listener`, which is a layer above; a test checks their
        calls.
    """

    program: Program
    shape: Shape
    options: Options
    memory: GlobalMemory
    units: AsyncUnits
    listeners: tuple[Any, ...]
    params: np.ndarray
    param_base: int
    param_views: Any
    bytes: Counter[str]
    counts: Counter[str]
    cluster_grid: tuple[int, int, int]
    late: bool  # the adversarial policy
    immediate: Any  # the only listener, if it needs no Work
    every_block: bool
    every_access: bool
    every_lane: bool
    note_progress: Callable[[], None]

    @property
    def ready(self) -> Callable[[Warp], None]: ...

    def gives_up(self) -> bool: ...

    def find(self, check: str, message: str) -> None: ...

    def report(self, finding: Finding) -> None: ...

    def issue(self, w: Warp, work: Work, queue: WorkQueue | None = None) -> Work: ...

    def read_bytes(self, w: Warp, address: int, nbytes: int) -> builtins.bytes: ...

    def cancel_cluster(self, by: Cluster) -> tuple[int, int, int] | None: ...

    def sm_of(self, cta: Cta) -> int: ...

    def warp_exited(self, warp: Warp) -> None: ...


@dataclass(eq=False, slots=True)
class NamedBarrier:
    """bar / barrier.cta: counts threads, warp by warp.

    A count of 0 means every thread of the CTA that has not exited.
    """

    cta: Cta
    ident: int
    count: int = 0
    arrived: int = 0
    # bar.red: threads whose predicate holds, threads that have one
    votes: tuple[int, int] = (0, 0)
    result: tuple[int, int] = (0, 0)  # the votes of the phase that completed last
    waiters: Waiters = field(default_factory=list)
    agents: list[str] = field(default_factory=list)  # the warps that have arrived

    def __str__(self) -> str:
        """Describe, for a deadlock report, what waiters of this barrier wait for."""
        of = f"barrier {self.ident} of {self.cta.name()}"
        return f"{of}: {self.arrived} of {self.expected()} threads arrived"

    def vote(self, true: int, threads: int) -> None:
        """bar.red: the predicates of threads that are about to arrive."""
        self.votes = self.votes[0] + true, self.votes[1] + threads

    def add(self, threads: int, count: int, by: str = "") -> bool:
        """Count an arrival of a warp; True when it completes the barrier."""
        if self.arrived and self.count != count:
            raise HardwareRefusal(
                f"barrier {self.ident}: {count} threads expected here, but {self.count} by "
                "threads that arrived before"
            )
        self.count = count
        self.arrived += threads
        self.agents.append(by)
        expected = count or self.expected()
        if self.arrived < expected:
            return False
        if self.arrived > expected:
            raise HardwareRefusal(
                f"barrier {self.ident}: {self.arrived} threads arrived, {expected} expected"
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
        self.result, self.votes = self.votes, (0, 0)
        waiters, self.waiters = self.waiters, []
        for each in self.cta.machine.listeners:
            each.barrier_completed(self, waiters)
        for warp, fragment in waiters:
            warp.wake(fragment, token=self.result)
        return True


class Cta:
    """State of one CTA. `views` are typed views of `smem` by element size in bytes."""

    def __init__(
        self,
        machine: Launch,
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
        self.smem_at = self.smem.ctypes.data
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
        """Return the context of primitives that the warp of that index executes."""
        if self._places is None:
            self._places = self.smem_at, self.tmem.cells_at, self.tmem.columns.ctypes.data
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
        machine = self.machine
        self.mbarriers[offset] = MBarrier(
            offset, self._name, count, machine.listeners, machine.units, site
        )

    def barrier(self, ident: int) -> NamedBarrier:
        if not 0 <= ident < MAX_NAMED_BARRIERS:
            raise HardwareRefusal(f"barrier {ident}; must be 0..{MAX_NAMED_BARRIERS - 1}")
        if ident not in self.barriers:
            self.barriers[ident] = NamedBarrier(self, ident)
        return self.barriers[ident]

    def check(self, offset: int, nbytes: int) -> None:
        """Check that [offset, offset + nbytes) lies in this CTA's shared memory."""
        if offset < 0 or offset + nbytes > self.smem_size:
            raise OutOfBounds(
                f"shared access of {nbytes} bytes at offset {offset:#x}; {self.name()} has "
                f"{self.smem_size} bytes ({self.smem_size:#x})"
            )

    def check_warpgroups(self) -> None:
        """The manual wants setmaxnreg executed alike by all four warps of a warpgroup.
        FlashAttention-4's backward pass and CUTLASS's mixed_input_gemm, right on hardware, give
        counts of their own to single warps: a note. So does CUTLASS's GEMM for GeForce to its
        fifth warp, the only one of its warpgroup. wgmma needs all four, too."""
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
        """A warp that asks for registers waits until others give them back. There are as many as
        the launch took: an equal part of the file for each thread, a multiple of eight. An H200
        waits for ever where the counts add up to more (notes/compilers.md, 2026-11-26)."""
        counts = [warp.register_counts[-1] for warp in self.warps if warp.register_counts]
        threads = len(self.warps) * WARP_LANES
        at_launch = min(MAX_REGISTERS, REGISTER_FILE // threads // 8 * 8)
        asked, taken = sum(counts) * WARP_LANES, at_launch * threads
        if asked > taken and register_count_known(self.machine.program.entry.directives):
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


@dataclass(eq=False)
class Cluster:
    """The CTAs launched together, and their barrier; one CTA in a launch without clusters."""

    machine: Launch
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


class Warp:
    """State of one warp of a CTA."""

    def __init__(
        self, cta: Cta, index: int, program: Program, threads: int, block: tuple[int, int, int]
    ) -> None:
        self.cta = cta
        self.machine = cta.machine
        self.listeners, self.immediate = cta.machine.listeners, cta.machine.immediate
        self.follower: Follower | None = None  # of undefined data, where a listener set one
        self.told: Callable[..., bool] = not_told
        self.storing: np.ndarray | None = None  # values of a shared store, [element, start]
        self.how = ""  # semantics of the access that is running, where it is strong
        self.at = 0  # the instruction that is running; in a program that is not `checked`, the
        # latest with effects that primitives do not have
        self.cluster = cta.cluster
        self.index = index
        self.label = f"warp {index} of {cta.name()}"
        self.program = program
        self.R = list(program.initial)
        if program.frame is not None:
            self.file_bytes, self.file = program.frame.new_file()
            self.native = cta.context(index)
            self.context = self.native.address
        self.counts = [0] * len(program.blocks)
        self.path: list[int] | None = None  # the blocks in order, where somebody records them
        self.fairness = _FAIRNESS
        self.live = ALL if threads >= 32 else (1 << threads) - 1
        self.nonuniform: set[str] = set()
        self.frags = [Fragment(0, self.live)]
        self.frag = self.frags[0]  # the fragment whose turn it is
        self.queued = False  # in the scheduler's ready list
        self.woken = False  # has not had a turn since a wait ended
        self.polled = False  # this turn looked at something that another may change, in vain or not
        self.stored = False  # this turn wrote memory
        self.long = False  # this turn may have many blocks
        self.exiting = False  # lanes exited in the block that is running
        self.steps = 0  # blocks taken one fragment at a time
        self.tid = thread_numbers(index, block)
        self.smem_base = cta.rank << 24
        self.local: np.ndarray | None = None
        self.bulk = BulkGroups(cta.machine.units)
        self.copies = BulkGroups(cta.machine.units)  # of cp.async, which is in order
        self.copy_queue = WorkQueue()
        self.pending_loads: list[PendingLoad] = []  # late tcgen05.ld
        self.pending_stores: list[tuple[int, Move, np.ndarray]] = []  # late tcgen05.st
        self.cluster_phase = self.cluster_lanes = 0  # the lanes that have arrived and not waited
        self.register_counts: list[int] = []  # asked for by setmaxnreg, in order

    # -- turns ------------------------------------------------------------------------------

    def run(self, quantum: int) -> int:
        """Execute up to `quantum` blocks; returns how many ran. Stops early when parked or done,
        and when it ended its own wait: the others that it woke have their turn first."""
        ran, self.long, watched = 0, quantum >= _LONG, self.machine.every_block
        while ran < quantum and self.live and not self.woken:
            frag = self.frags[0]
            whole = len(self.frags) == 1 and frag.mask == ALL and not self.nonuniform
            if whole and not watched:
                if frag.wait is not None:
                    return ran
                ran += self._run_whole(frag, quantum - ran)
            elif not self._step():
                return ran
            else:
                ran += 1
        return ran

    def _run_whole(self, frag: Fragment, quantum: int) -> int:
        """The common case: all 32 lanes together and no scalar promoted."""
        fast, registers, counts, path = self.program.fast, self.R, self.counts, self.path
        self.frag = frag
        pc = frag.pc
        for ran in range(1, quantum + 1):
            frag.pc = pc
            after = fast[pc](self, registers)
            if after == PARKED:
                return ran
            counts[pc] += 1
            if path is not None:
                path.append(pc)
            if after < 0:
                after = self._elected(frag, pc) if after == ELECTED else self._left(frag, after)
                if after < 0:
                    return ran
            pc = after
        frag.pc = pc
        return quantum

    def _left(self, frag: Fragment, after: int) -> int:
        """The place of the whole warp after lanes of it branched or exited; negative if none."""
        if after == SPLIT and self._skirted(frag):
            return frag.pc
        if self.exiting:
            self._settle_exits()
        return after

    def _elected(self, frag: Fragment, pc: int) -> int:
        """The first lane alone executes the block behind `pc`, at once if it may; as `_skirted`."""
        join, skirt = self.program.skirt(pc + 1)
        if join < 0 or not self.long or (self.steps + 1) % self.fairness == 0:
            return self.branch(_OTHERS, pc + 2, pc + 1, ALL)
        self.steps += 1
        frag.pc, frag.mask, frag.lanes = pc + 1, 1, _FIRST
        skirt(self, self.R, _FIRST, 1)
        self._ran(pc + 1)
        frag.pc, frag.mask, frag.lanes = join, ALL, None
        return SPLIT if self.nonuniform else join

    def _ran(self, pc: int) -> None:
        """Called at the end of a block."""
        self.counts[pc] += 1
        if self.path is not None:
            self.path.append(pc)

    def _skirted(self, frag: Fragment) -> bool:
        """Right after a branch of a whole warp: where it goes round one block, the lanes that
        execute it do so now, as they would next, and the warp is whole again."""
        frags, pc = self.frags, frag.pc
        last = (self.steps + 1) % self.fairness == 0  # it is the turn of the others
        if last or not self.long or self.exiting or len(frags) != 2:
            return False
        join, skirt = self.program.skirt(pc)
        if join != frags[1].pc:
            return False
        self.steps += 1
        skirt(self, self.R, frag.active(), frag.mask)
        self._ran(pc)
        del frags[1]
        frag.pc, frag.mask, frag.lanes = join, ALL, None
        return not self.nonuniform

    def _step(self) -> bool:
        """Execute one block of one fragment; return False when no fragment can go on."""
        self._merge()
        self.steps += 1
        frags = self.frags
        if len(frags) > 1:
            # now and then the last goes first, so that a polling loop does not starve its siblings
            late = self.steps % self.fairness == 0
            if late or len(frags) > 2 or frags[1].pc < frags[0].pc:
                frags = sorted(frags, key=_PLACE, reverse=late)
        for frag in frags:
            if frag.wait is None and self.together(frag):
                self._execute(frag)
                return True
        return False

    def _execute(self, frag: Fragment) -> None:
        self.frag, told = frag, self.listeners if self.machine.every_block else ()
        for each in told:
            each.block_began(self)
        program, pc, mask = self.program, frag.pc, frag.mask
        promoted = program.live_scalars[pc] & self.nonuniform if self.nonuniform else _NONE
        if mask != ALL:
            function = program.version(pc, 1 if mask == self.live else 2, promoted)
            after = function(self, self.R, frag.active(), mask)
        elif self.nonuniform:
            after = program.version(pc, 0, promoted or _SOME)(self, self.R)
        else:
            after = program.fast[pc](self, self.R)
        if after == PARKED:
            return
        if after == ELECTED:
            after = self.branch(_OTHERS, pc + 2, pc + 1, ALL)
        self._ran(pc)
        for each in told:
            each.block_ended(self, program.lengths[pc])
        if self.exiting:
            self._settle_exits()
        if after >= 0:
            frag.pc = after

    def _merge(self) -> None:
        """Join fragments that are at the same block and wait for nothing."""
        frags = self.frags
        if len(frags) == 1 or (len(frags) == 2 and frags[0].pc != frags[1].pc):
            return
        if len({frag.pc for frag in frags}) == len(frags):
            return
        free: dict[int, Fragment] = {}
        rest = []
        for frag in self.frags:
            if frag.wait is not None or frag.token is not None:
                rest.append(frag)
            elif frag.pc in free:
                first = free[frag.pc]
                first.mask |= frag.mask
                first.lanes = None
            else:
                free[frag.pc] = frag
        self.frags = rest + list(free.values())

    def together(self, frag: Fragment) -> bool:
        """The lanes that the fragment's block needs together are all in it."""
        members = self.program.blocks[frag.pc].members
        if not members or frag.mask == self.live:
            return True
        return all(self._required(member, frag) & self.live & ~frag.mask == 0 for member in members)

    def _required(self, member: Reg | Imm | None, frag: Fragment) -> int:
        """Lanes named by the member-mask operand of `frag`'s lanes; None stands for all."""
        if member is None:
            return ALL
        if not isinstance(member, Reg):
            return int(member.value) & ALL
        slot, _ = self.program.registers.slots(member.name)[0]
        frame = self.program.frame
        if frame is not None and slot in frame.offsets:
            value = get(self.file_bytes, frame.offsets[slot], np.uint32)
        else:
            value = self.R[slot]
        if not isinstance(value, np.ndarray):
            return int(value)
        return int(np.bitwise_or.reduce(value[bits_mask(frag.mask)]))

    def note_accesses(self, where: int) -> None:
        """Primitives note the accesses that they do, see `native.accesses`."""
        if self.program.frame is not None:
            self.native.note_at(where)

    # -- what generated code and instructions call --------------------------------------------

    def branch(self, condition: int, taken: int, after: int, mask: int) -> int:
        """A branch whose predicate holds in the lanes of `condition`."""
        yes = condition & mask
        if yes == mask:
            return taken if taken >= 0 else self.exit(mask)
        if yes == 0:
            return after
        if taken == EXITED:
            self.exit(yes)
            self.frag.pc = after
            return SPLIT
        self.frag.pc, self.frag.mask, self.frag.lanes = after, mask & ~yes, None
        self.frags.append(Fragment(taken, yes))
        return SPLIT

    def exit(self, mask: int) -> int:
        """The lanes of `mask` are done."""
        self.live &= ~mask
        for frag in self.frags:
            frag.mask &= ~mask
            frag.lanes = None
        self.frags = [frag for frag in self.frags if frag.mask]
        self.exiting = True
        return EXITED

    def _settle_exits(self) -> None:
        """Tell the machine of lanes that exited, once the block they exited in is counted."""
        self.exiting = False
        self.machine.warp_exited(self)

    def trap(self) -> int:
        instr = self.program.blocks[self.frag.pc].steps[-1].instr
        raise HardwareRefusal("trap executed", line=instr.line, text=instr.text)

    def park(self, wait: object) -> None:
        """The running fragment waits; its block will be executed again when woken."""
        self.frag.wait = wait

    def wake(self, frag: Fragment, *, token: object = None) -> None:
        """Wake the fragment; `token` marks, when it runs its block again, that its wait is over."""
        frag.wait = None
        if token is not None:
            frag.token = token
        self.woken = True
        self.machine.ready(self)

    def runnable_now(self) -> bool:
        """Whether some fragment can run."""
        if len(self.frags) == 1:
            frag = self.frags[0]
            return frag.wait is None and (frag.mask == self.live or self.together(frag))
        self._merge()
        return any(frag.wait is None and self.together(frag) for frag in self.frags)

    def name(self) -> str:
        return self.label

    def lanes(self) -> list[int]:
        """The active lanes, in order."""
        return list(lanes_of(self.frag.mask))

    def lane_values(self, value: PerLane) -> list[Any]:
        """The value in each active lane, as Python scalars, in lane order."""
        lanes = lanes_of(self.frag.mask)
        if not isinstance(value, np.ndarray):
            return [value] * len(lanes)
        if len(lanes) == 1:
            return [value.item(lanes[0])]
        return value[list(lanes)].tolist()

    def agreed(self, value: PerLane, what: str) -> Any:
        """An operand that all active lanes must have alike."""
        if not isinstance(value, np.ndarray):
            return value
        first, *rest = set(self.lane_values(value))
        if rest:
            raise HardwareRefusal(f"{what} differs between the lanes of {self.name()}")
        return first

    def each_lane(self, *values: PerLane) -> Iterator[tuple[Any, ...]]:
        """The operands of every active lane together: each lane issues its own operation."""
        for value in values:
            if isinstance(value, np.ndarray):
                return zip(*(self.lane_values(value) for value in values), strict=True)
        return iter((values,) * self.frag.mask.bit_count())


_NONE: frozenset[str] = frozenset()
_SOME = frozenset({""})  # forces the version that keeps the set of promoted registers up to date


@dataclass(eq=False)
class Part:
    """Registers of one warp in an operation."""

    warp: Warp
    a: Registers  # before the operation
    d: Registers  # before the operation
    out: np.ndarray  # results, uint32 (registers, 32)
    metadata: Registers = ()  # one register for a sparse A
    late: bool = True  # the warp has not waited for it


@dataclass(eq=False)
class Multiplication:
    """wgmma.mma_async of a warpgroup; `number` counts the group's operations from 1."""

    group: Warpgroup
    number: int
    operands: Operands
    parts: list[Part | None] = field(default_factory=lambda: [None] * WARPS)
    work: Work | None = None  # once all warps have come
    waiters: Waiters = field(default_factory=list)

    def __str__(self) -> str:
        """Describe, for a deadlock report, what waiters of this operation wait for."""
        absent = [self.group.first + k for k, part in enumerate(self.parts) if part is None]
        form, line, *_ = self.operands
        return (
            f"{form.label} at line {line} of {self.group}: not executed by"
            f" warp{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}"
        )


@dataclass(eq=False)
class Progress:
    """Progress of one warp."""

    issued: int = 0  # number of operations the warp has executed
    groups: list[int] = field(default_factory=list)  # last operation of each committed group
    pending: deque[Multiplication] = field(default_factory=deque)  # not waited for


class Warpgroup:
    """Warps `first` to `first` + 3 of a CTA. They come to a wgmma instruction in any order and do
    not wait for one another there; the operation begins when the last has come, and those of a
    warpgroup complete in order."""

    def __init__(self, cta: Cta, first: int) -> None:
        self.cta = cta
        self.first = first
        self.queue = WorkQueue()
        self.gathering: dict[int, Multiplication] = {}  # by number
        self.progress = [Progress() for _ in range(WARPS)]

    def __str__(self) -> str:
        return f"warps {self.first}-{self.first + WARPS - 1} of {self.cta.name()}"

    def of(self, w: Warp) -> Progress:
        return self.progress[w.index - self.first]

    def add(self, part: Part, operands: Operands) -> Multiplication | None:
        """Add a warp that reaches its next operation; return the operation for the last warp."""
        w = part.warp
        own = self.of(w)
        own.issued += 1
        found = self.gathering.setdefault(own.issued, Multiplication(self, own.issued, operands))
        if found.operands != operands:
            raise HardwareRefusal(
                f"{w.name()} executes {_told(operands)}, but another warp of its warpgroup"
                f" {_told(found.operands)}; all four execute one instruction, with equal operands"
            )
        found.parts[w.index - self.first] = part
        own.pending.append(found)
        if None in found.parts:
            return None
        return self.gathering.pop(own.issued)

    def require_whole(self) -> None:
        """At the end of the CTA, each operation has been executed by all four warps."""
        for each in self.gathering.values():
            raise HardwareRefusal(f"the CTA has ended, but {each}", line=each.operands[1])

    def commit(self, w: Warp) -> None:
        own = self.of(w)
        own.groups.append(own.issued)

    def awaited(self, w: Warp, allowed: int) -> Iterator[Multiplication]:
        """Operations of all but the newest `allowed` groups of a warp, oldest first."""
        own = self.of(w)
        last = own.groups[-1 - allowed] if len(own.groups) > allowed else 0
        yield from (each for each in own.pending if each.number <= last)

    def complete(self, w: Warp, last: int) -> None:
        """The warp knows that operations up to number `last` are complete."""
        own = self.of(w)
        while own.pending and own.pending[0].number <= last:
            part = own.pending.popleft().parts[w.index - self.first]
            assert part is not None, "it was executed"
            part.late = False

    def reading(self, w: Warp, registers: np.ndarray) -> Multiplication | None:
        """Return the operation that will write `registers`, unless the warp has waited for it."""
        for each in self.of(w).pending:
            part = each.parts[w.index - self.first]
            if part is not None and part.out is registers:
                return each
        return None


def _told(operands: Operands) -> str:
    form, line, a, b, accumulate = operands
    of_a = "A in registers" if a is None else f"A {a:#x}"
    return f"{form.label} at line {line} with {of_a}, B {b:#x}, scale-d {int(accumulate)}"
