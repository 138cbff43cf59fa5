"""Listener that records a launch.

Accesses are recorded by the primitives that execute them (`native.accesses`), or here if Python
executes them. The listener itself receives none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from ptxemu.codegen.program import Program
from ptxemu.machine.async_ops import Work
from ptxemu.machine.listener import (
    How,
    Lanes,
    Listener,
    Place,
    Position,
    Rows,
    Signals,
    Starts,
    Waiters,
)
from ptxemu.machine.mbarrier import MBarrier
from ptxemu.machine.mma import Mma
from ptxemu.machine.shape import Shape
from ptxemu.machine.state import Cta, Multiplication, NamedBarrier, Warp
from ptxemu.machine.tensor_map import TensorMap
from ptxemu.machine.tmem_fill import Fill
from ptxemu.machine.umma_desc import SmemDesc
from ptxemu.native.accesses import (
    BANKS,
    COPIED,
    FIRST,
    GLOBAL,
    NEXT,
    ROOM,
    SHARED,
    kind,
    note_global,
    note_shared,
)
from ptxemu.native.library import compiled
from ptxemu.native.routines import Pointer, p_i64, p_u8, p_u32
from ptxemu.record import recording as r
from ptxemu.record.recording import Barrier, Event, Recording, Signalled, WarpRecord

_START = 1 << 12  # words
_ONE = 1 << 16  # pass
# which lanes are active, by how many they are
_ACTIVE = (np.arange(BANKS) < np.arange(BANKS + 1)[:, None]).astype(np.uint8)
_ACTIVE_AT = _ACTIVE.ctypes.data
_kind = cache(kind)


class _Row:
    """Addresses of lanes, in the format of a routine."""

    def __init__(self, note: Callable[..., int], pointer: type[Pointer]) -> None:
        self._addresses = np.zeros(BANKS, pointer.dtype)
        self._at = self._addresses.ctypes.data
        self._note, self._pointer, self._compiled = note, pointer, compiled(note)

    def noted(self, words: np.ndarray, at: int, what: int, starts: np.ndarray) -> int:
        """Record an access; return 1 if there is no room."""
        count = len(starts)
        self._addresses[:count] = starts
        if self._compiled is not None:
            found: int = self._compiled(at, self._at, _ACTIVE_AT + BANKS * count, what)
            return found
        return self._note(p_i64(words), self._pointer(self._addresses), p_u8(_ACTIVE[count]), what)


class Notes:
    """Accesses of a warp. address: argument for the primitives."""

    def __init__(self) -> None:
        self._words = np.zeros(FIRST + _START, np.int64)
        self._words[NEXT], self._words[ROOM] = FIRST, len(self._words)
        self._shared = _Row(note_shared, p_u32)
        self._global = _Row(note_global, p_i64)
        self._full: list[np.ndarray] = []
        self.address = self._words.ctypes.data

    def add(self, memory: str, store: bool, nbytes: int, starts: int | np.ndarray) -> None:
        """An access that no primitive did. starts: of its lanes, or one of all of them."""
        what = _kind(memory, store, nbytes)
        if isinstance(starts, int):
            self._put(what | _ONE, starts)
        else:
            self._put_lanes(self._shared if memory == SHARED else self._global, what, starts)

    def add_idle(self, memory: str, nbytes: int) -> None:
        """An access that asks nothing of memory."""
        self._put(_kind(memory, False, nbytes), 0)

    def _put(self, head: int, first: int) -> None:
        if self._words[NEXT] + 2 > len(self._words):
            self._make_room()
        place = int(self._words[NEXT])
        self._words[place], self._words[place + 1] = head, first
        self._words[NEXT] = place + 2

    def _make_room(self) -> None:
        self._full.append(self._words[FIRST : self._words[NEXT]].copy())
        self._words[NEXT] = FIRST

    def _put_lanes(self, row: _Row, what: int, starts: np.ndarray) -> None:
        if row.noted(self._words, self.address, what, starts):
            self._make_room()
            row.noted(self._words, self.address, what, starts)

    def words(self) -> np.ndarray:
        """Two of each access."""
        return np.concatenate([*self._full, self._words[FIRST : self._words[NEXT]]])


# Lanes that diverge reconverge at the next block, as in the machine code, unless those ahead poll
# for an action of those behind.
_PATIENCE = 1 << 18


class _Tape:
    """Record of one warp so far."""

    def __init__(self, w: Warp) -> None:
        self.path: list[int] = []
        self.events: list[Event | None] = []  # None: issued, and nothing is known of it
        self.notes = Notes()
        w.path, w.fairness = self.path, _PATIENCE
        w.note_accesses(self.notes.address)

    def add(self, w: Warp, what: str, signals: Signalled = (), shape: tuple[int, ...] = ()) -> None:
        self.events.append(Event(len(self.path), w.at, what, signals, shape))


class _Issued(NamedTuple):
    """Position at which an operation is recorded."""

    tape: _Tape
    number: int  # of its event
    block: int
    site: int


def _together(one: Event, other: Event) -> Event:
    """Merge two events of one instruction: of other lanes, or another part of its effect."""
    total = dict(one.signals)
    for barrier, amount in other.signals:
        total[barrier] = total.get(barrier, 0) + amount
    shape = one.shape
    if shape and one.what in (r.LOAD, r.SEND, r.STORE):
        shape = (shape[0] + other.shape[0], *shape[1:])
    return one._replace(signals=tuple(total.items()), shape=shape)


def _numbered(events: list[Event | None]) -> list[Event]:
    """Return one event per instruction, whatever its lanes do.

    Instructions without a recorded effect are left out; the path has them.
    """
    kept: list[Event] = []
    for event in events:
        if event is None:
            continue
        if kept and kept[-1][:3] == event[:3]:
            kept[-1] = _together(kept[-1], event)
        else:
            kept.append(event)
    return kept


class Recorder(Listener):
    """Recorder of one launch. Work is recorded at its issue, its effects when they happen."""

    every_access = False

    def __init__(self, program: Program, shape: Shape) -> None:
        edges = accumulate(program.lengths, initial=0)
        self.recording = Recording(
            program.entry.name,
            shape.grid,
            shape.block,
            shape.cluster,
            shape.smem_used(program),
            program.sites,
            [range(*edge) for edge in pairwise(edges)],
            program.entry.target,
        )
        self._tapes: dict[Warp, _Tape] = {}
        self._ended: list[tuple[WarpRecord, _Tape]] = []
        self._barriers: dict[MBarrier, Barrier] = {}
        self._open: dict[Work, _Issued] = {}
        self._fetched: Work | None = None
        self._arrived: defaultdict[NamedBarrier, list[tuple[_Tape, int]]] = defaultdict(list)

    # -- warps ------------------------------------------------------------------------------

    def warp_started(self, w: Warp) -> None:
        self._tapes[w] = _Tape(w)

    def warp_ended(self, w: Warp) -> None:
        tape = self._tapes.pop(w)
        path = np.array(tape.path, np.uint32)
        self._ended.append(
            (WarpRecord(w.cluster.index, w.cta.rank, w.index, path, [], tape.notes.words()), tape)
        )

    def finished(self, places: int = 0) -> Recording:
        """Return the recording after the launch, since work may outlive the warp that issued it.

        places: see `Recording`.
        """
        self.recording.places = places
        for record, tape in self._ended:
            record.events = _numbered(tape.events)
            self.recording.warps.append(record)
        self._ended = []
        return self.recording

    # -- accesses that no primitive did -----------------------------------------------------

    def shared_access(
        self, w: Warp, cta: Cta, starts: Starts, nbytes: int, lanes: Lanes, write: bool
    ) -> None:
        self._tapes[w].notes.add(SHARED, write, nbytes, starts)

    def global_read(self, w: Warp, starts: Starts, nbytes: int, lanes: Lanes) -> None:
        self._tapes[w].notes.add(GLOBAL, False, nbytes, starts)

    def global_write(
        self, w: Warp, starts: np.ndarray, size: int, values: np.ndarray, lanes: Lanes
    ) -> None:
        self._tapes[w].notes.add(GLOBAL, True, size * len(values), starts)

    def atomic(self, w: Warp, space: str, name: str, address: Starts, size: int) -> None:
        self._add(w, r.ATOMIC, shape=(w.frag.mask.bit_count(),))

    # -- synchronisation --------------------------------------------------------------------

    def _add(
        self, w: Warp, what: str, signals: Signalled = (), shape: tuple[int, ...] = ()
    ) -> None:
        self._tapes[w].add(w, what, signals, shape)

    def mbarrier_initialised(self, w: Warp, cta: Cta, barrier: MBarrier) -> None:
        offset = next(k for k, each in reversed(cta.mbarriers.items()) if each is barrier)
        self._barriers[barrier] = cta.rank, offset
        self._add(w, r.INIT, ((self._barriers[barrier], barrier.expected),))

    def mbarrier_arrival(
        self, w: Warp, cta: Cta, barrier: MBarrier, how: How, count: tuple[int, int] = (1, 1)
    ) -> None:
        self._add(w, r.ARRIVE, ((self._barriers[barrier], count[1]),))

    def mbarrier_expected(self, w: Warp, cta: Cta, barrier: MBarrier, nbytes: int) -> None:
        what = r.EXPECT if nbytes >= 0 else r.COMPLETE
        self._add(w, what, ((self._barriers[barrier], abs(nbytes)),))

    def mbarrier_waited(self, w: Warp, cta: Cta, barrier: MBarrier, parity: int, how: How) -> None:
        self._add(w, r.WAIT, ((self._barriers[barrier], parity),))

    def mbarrier_tested(self, w: Warp, cta: Cta, barrier: MBarrier, parity: int, how: How) -> None:
        self._add(w, r.WAIT, ((self._barriers[barrier], parity),))

    def barrier_arrival(self, w: Warp, barrier: NamedBarrier) -> None:
        self._add(w, r.BARRIER, shape=(barrier.ident, 0))
        tape = self._tapes[w]
        self._arrived[barrier].append((tape, len(tape.events) - 1))

    def barrier_completed(self, barrier: NamedBarrier, waiters: Waiters) -> None:
        """Complete arrivals with the number of threads, which only the completing instruction
        knows."""
        for tape, number in self._arrived.pop(barrier, ()):
            event = tape.events[number]
            assert event is not None, "an arrival is no work"
            tape.events[number] = event._replace(shape=(barrier.ident, barrier.expected()))

    # -- asynchronous operations ------------------------------------------------------------

    def issued(self, w: Warp, work: Work) -> None:
        tape = self._tapes[w]
        self._open[work] = _Issued(tape, len(tape.events), len(tape.path), w.at)
        tape.events.append(None)

    def _tell(
        self,
        work: Work,
        what: str,
        signals: Signalled = (),
        shape: tuple[int, ...] = (),
        address: int = 0,
    ) -> None:
        """Record an effect of a work, which may have several parts."""
        tape, number, block, site = self._open[work]
        event = Event(block, site, what, signals, shape, address)
        before = tape.events[number]
        tape.events[number] = event if before is None else _together(before, event)

    def step_ended(self, work: Work) -> None:
        if not work.steps:
            self._open.pop(work, None)

    def fetch(self, work: Work, starts: np.ndarray, nbytes: int) -> None:
        self._open[work].tape.notes.add(COPIED, False, nbytes, starts)
        self._fetched = work

    def copy(
        self, work: Work, cta: Cta, offsets: np.ndarray, lanes: np.ndarray, nbytes: int
    ) -> None:
        """Record a copy; one whose lanes all have no bytes to fetch is an access, too."""
        if self._fetched is not work:
            self._open[work].tape.notes.add_idle(COPIED, nbytes)

    def copies_arrival(self, work: Work, cta: Cta, barrier: MBarrier, *, lanes: int) -> None:
        self._tell(work, r.ARRIVE_AFTER, ((self._barriers[barrier], 1),))

    def land(
        self,
        work: Work,
        places: list[Place],
        nbytes: int,
        signals: Signals,
        *,
        atomic: bool = False,
    ) -> None:
        each = nbytes * len(places) // len(signals)
        told = tuple((self._barriers[signal], each) for signal in signals)
        self._tell(work, r.SEND, told, shape=(len(places), nbytes))

    def load(
        self, work: Work, source: Rows, places: list[Place], nbytes: int, signals: Signals
    ) -> None:
        starts, of_row = source
        # what mbarriers count: the box in shared memory may be padded, which they do not
        each = work.size * len(places) // len(signals)
        told = tuple((self._barriers[signal], each) for signal in signals)
        first, second = (int(starts[k]) if len(starts) > k else 0 for k in (0, 1))
        apart = second - first if second else 0
        self._tell(work, r.LOAD, told, (len(starts), of_row, apart), first)

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
        self._tell(work, r.SEND, ((self._barriers[signal], nbytes),), shape=(1, nbytes))

    def bulk_read(self, work: Work, cta: Cta, low: int, nbytes: int) -> None:
        self._tell(work, r.STORE, shape=(1, nbytes))

    def tile_read(self, work: Work, cta: Cta, tm: TensorMap, position: Position, low: int) -> None:
        row = tm.box[0] * tm.box_bytes // int(np.prod(tm.box))
        self._tell(work, r.STORE, shape=(tm.box_bytes // row, row))

    # -- tensor core ------------------------------------------------------------------------

    def multiply(self, work: Work, ctas: Sequence[Cta], mma: Mma) -> None:
        self._tell(work, r.MMA, shape=(mma.instr.m, mma.instr.n, len(ctas)))

    def warpgroup_multiply(self, what: Multiplication) -> None:
        if what.work is not None:
            self._tell(what.work, r.MMA, shape=(64, what.operands[0].n, 1))

    def fill(
        self, work: Work, ctas: Sequence[Cta], address: int, desc: SmemDesc, shape: Fill
    ) -> None:
        self._tell(work, r.FILL, shape=(work.size,))

    def commit_arrival(self, work: Work, cta: Cta, barrier: MBarrier) -> None:
        self._tell(work, r.COMMIT, ((self._barriers[barrier], 1),))
