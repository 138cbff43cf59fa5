"""A warp: its registers, its fragments (groups of lanes at one place), and how it takes a turn.

Divergence: a branch that differs between lanes splits a fragment in two; the runnable fragment at
the lowest block runs first; fragments that meet at a block merge. A block that needs the lanes
together (`.sync`, `.aligned` instructions) waits for the fragments that hold the others. A waiting
fragment lets its siblings run, as on hardware since Volta.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any

import numpy as np

from ptxemu.codegen.namespace import bits_mask, get
from ptxemu.codegen.program import EXITED, PARKED, Program
from ptxemu.codegen.tainted import Follower
from ptxemu.errors import HardwareRefusal
from ptxemu.machine.async_ops import BulkGroups, WorkQueue
from ptxemu.machine.cta import Cta
from ptxemu.machine.tmem import Move, PendingLoad
from ptxemu.numerics.lanes import PerLane
from ptxemu.syntax.tree import Imm, Reg

ALL = 0xFFFFFFFF
SPLIT = -3  # the fragment branched both ways
_FAIRNESS = 128  # blocks of parted lanes after which those behind have a turn
_LONG = 50  # blocks of a turn in which one more does not count
_PLACE = attrgetter("pc")


def unravelled(index: Any, dims: tuple[int, int, int]) -> tuple[Any, Any, Any]:
    """A place, or an array of places, in a grid of so many, x fastest."""
    x, y, _ = dims
    return index % x, index // x % y, index // (x * y)


@lru_cache(maxsize=4096)
def lanes_of(mask: int) -> tuple[int, ...]:
    """The lanes in a mask, in order."""
    return tuple(lane for lane in range(32) if mask >> lane & 1)


@lru_cache(maxsize=1024)
def _thread_numbers(warp: int, block: tuple[int, int, int]) -> tuple[Any, Any, Any]:
    """%tid of the lanes of a warp."""
    return unravelled(np.arange(warp * 32, warp * 32 + 32, dtype=np.uint32), block)


@dataclass(eq=False, slots=True)
class Fragment:
    """Lanes at one block. `wait`: what it is parked on; `token`: the meaning of a wake-up; `polls`:
    the mbarrier and parity that it last looked at in vain, and the block where it did."""

    pc: int
    mask: int
    lanes: np.ndarray | None = None
    wait: object | None = None
    token: Any = None
    polls: tuple[Any, int, int] | None = None

    def active(self) -> np.ndarray:
        if self.lanes is None:
            self.lanes = bits_mask(self.mask)
        return self.lanes


class Warp:
    """One warp of a CTA."""

    def __init__(
        self, cta: Cta, index: int, program: Program, threads: int, block: tuple[int, int, int]
    ) -> None:
        self.cta = cta
        self.machine = cta.machine
        self.listeners = cta.machine.listeners
        self.follower: Follower | None = None  # of undefined data, where a listener set one
        self.told: Callable[..., bool] = _not_told
        self.how = ""  # semantics of the access that is running, where it is strong
        self.at = 0  # the instruction that is running; in a program that is not `checked`, the
        # latest with effects that primitives do not have
        self.cluster = cta.cluster
        self.index = index
        self.label = f"warp {index} of {cta.name()}"
        self.program = program
        self.R = list(program.initial)
        if program.frame is not None:
            self.file_bytes = program.frame.new_file()
            self.file = self.file_bytes.ctypes.data
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
        self.tid = _thread_numbers(index, block)
        self.smem_base = cta.rank << 24
        self.local: np.ndarray | None = None
        self.bulk = BulkGroups(cta.machine.units)
        self.copies = BulkGroups(cta.machine.units)  # of cp.async, which is in order
        self.copy_queue = WorkQueue()
        self.pending_loads: list[PendingLoad] = []  # late tcgen05.ld
        self.pending_stores: list[tuple[int, Move, np.ndarray]] = []  # late tcgen05.st
        self.cluster_phase = 0
        self.cluster_lanes = 0  # those that have arrived and not waited
        self.register_counts: list[int] = []  # asked for by setmaxnreg, in order

    # -- turns ------------------------------------------------------------------------------

    def run(self, quantum: int) -> int:
        """Execute up to `quantum` blocks; returns how many ran. Stops early when parked or done,
        and when it ended its own wait: the others that it woke have their turn first."""
        ran, self.long = 0, quantum >= _LONG
        while ran < quantum and self.live and not self.woken:
            frag = self.frags[0]
            whole = len(self.frags) == 1 and frag.mask == ALL and not self.nonuniform
            if whole and not self.machine.every_block:
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
        pc, ran = frag.pc, 0
        while ran < quantum:
            frag.pc = pc
            after = fast[pc](self, registers)
            ran += 1
            if after < 0 and after != SPLIT:
                if after != PARKED:
                    self._ran(pc)
                    if self.exiting:
                        self._settle_exits()
                return ran
            counts[pc] += 1
            if path is not None:
                path.append(pc)
            if after == SPLIT:
                if not self._skirted(frag):
                    return ran
                after = frag.pc
            pc = after
        frag.pc = pc
        return ran

    def _ran(self, pc: int) -> None:
        """A block has come to its end."""
        self.counts[pc] += 1
        if self.path is not None:
            self.path.append(pc)

    def _skirted(self, frag: Fragment) -> bool:
        """Right after a branch of a whole warp: where it goes round one block, the lanes that
        execute it do so now, as they would next, and the warp is whole again."""
        frags, pc = self.frags, frag.pc
        last = (self.steps + 1) % self.fairness == 0  # it is the turn of the others
        if last or not self.long or self.exiting or len(frags) != 2:
            return self._parted()
        if self.program.blocks[pc].join != frags[1].pc:
            return False
        self.steps += 1
        self.program.version(pc, 2, _NONE)(self, self.R, frag.active(), frag.mask)
        self._ran(pc)
        self.frags, frag.pc = frags[:1], frags[1].pc
        frag.mask, frag.lanes = ALL, None
        return not self.nonuniform

    def _parted(self) -> bool:
        """The block that parted the lanes may have ended some of them."""
        if self.exiting:
            self._settle_exits()
        return False

    def _step(self) -> bool:
        """One block of one fragment; False when no fragment can go on."""
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
        """`token` tells the fragment, when it runs its block again, that its wait is over."""
        frag.wait = None
        if token is not None:
            frag.token = token
        self.woken = True
        self.machine.ready(self)

    def take_token(self) -> Any:
        """The token, once after a wake-up that completed what the fragment waited for."""
        token, self.frag.token = self.frag.token, None
        return token

    def runnable_now(self) -> bool:
        """Some fragment can take a turn."""
        if len(self.frags) == 1:
            frag = self.frags[0]
            return frag.wait is None and self.together(frag)
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


def _not_told(w: Warp, starts: np.ndarray, mb: int, nbytes: int, write: bool) -> bool:
    """Whether all listeners have heard of an ordinary access of the CTA's shared memory by the
    lanes of `mb`, `nbytes` at each of `starts`, uint32 [32], and there is nothing more to it: then
    it is in bounds, and a primitive does it. Where a listener knows that, it replaces this."""
    return False


_NONE: frozenset[str] = frozenset()
_SOME = frozenset({""})  # forces the version that keeps the set of promoted registers up to date
