"""CTAs of one launch in several processes (`Options.processes`): speculation, then a proof.

Each process is a fork that runs a row of neighbouring clusters on a copy of memory, and records
which bytes it reads and writes. Suppose each ends without an error or a finding, and none has
written what another has touched. Then the order of the clusters makes no difference: their writes
and counts are merged in the order of the clusters. Else they are discarded, and the launch runs in
this process, whose memory is still untouched.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import pickle
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import numpy as np

from ptxemu import watch
from ptxemu.check.checker import Checker
from ptxemu.errors import Deadlock, LimitExceeded
from ptxemu.findings import Finding, Launch
from ptxemu.machine.machine import Machine
from ptxemu.machine.memory import FIRST_ADDRESS, GlobalMemory
from ptxemu.native.memory import Table

# Which bytes of global memory a process has read and written: what processes that execute parts of
# one launch compare, to know that the parts did not talk to each other.
#
# An access is noted where it is checked. Machine code would note nothing, so a memory that is
# watched lets it know of no range: each access is left to Python.

_ROOM = 1 << 18  # addresses that are noted before they are joined to ranges


class Ranges:
    """Bytes as disjoint ranges [low, high), sorted; int64 (n, 2)."""

    def __init__(self) -> None:
        self._joined = np.empty((0, 2), np.int64)
        self._noted: dict[int, list[np.ndarray]] = {}  # starts, by bytes at each
        self._boxes: dict[tuple[int, int, int], np.ndarray] = {}  # offsets, see `add_box`
        self._pairs: list[tuple[int, int]] = []
        self._count = 0

    def add(self, low: int, high: int) -> None:
        self._pairs.append((low, high))
        self._counted(1)

    def add_each(self, starts: np.ndarray, nbytes: int) -> None:
        """`nbytes` at each of the addresses."""
        self._noted.setdefault(nbytes, []).append(starts.astype(np.int64).ravel())
        self._counted(starts.size)

    def add_box(self, first: int, offsets: np.ndarray, nbytes: int) -> None:
        """`nbytes` at `first` plus each offset; most boxes are read again and again."""
        key = first, id(offsets), nbytes
        if key not in self._boxes:
            self._boxes[key] = offsets
            self._counted(offsets.size)

    def _counted(self, more: int) -> None:
        self._count += more
        if self._count > max(_ROOM, len(self._joined)):
            self.joined()

    def joined(self) -> np.ndarray:
        """All recorded ranges, joined."""
        parts = [self._joined, np.array(self._pairs, np.int64).reshape(-1, 2)]
        for (first, _, nbytes), offsets in self._boxes.items():
            self._noted.setdefault(nbytes, []).append(offsets + first)
        for nbytes, noted in self._noted.items():
            starts = np.sort(np.concatenate(noted))
            parts.append(_join(np.stack([starts, starts + nbytes], 1)))
        self._joined = _join(np.concatenate(parts))
        self._noted, self._boxes, self._pairs, self._count = {}, {}, [], 0
        return self._joined


def _join(ranges: np.ndarray) -> np.ndarray:
    """Sort ranges and merge those that overlap or touch."""
    if not len(ranges):
        return ranges
    ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]
    ends = np.maximum.accumulate(ranges[:, 1])
    first = np.flatnonzero(np.concatenate([[True], ranges[1:, 0] > ends[:-1]]))
    return np.stack([ranges[first, 0], ends[np.append(first[1:], len(ranges)) - 1]], 1)


def _meet(some: np.ndarray, others: np.ndarray) -> bool:
    """Whether two lists of ranges have a byte in common."""
    if not len(some) or not len(others):
        return False
    behind = np.searchsorted(others[:, 0], some[:, 1], "left")  # others that begin before it ends
    return bool((others[np.maximum(behind - 1, 0), 1] > some[:, 0])[behind > 0].any())


def talk(parts: Sequence[tuple[np.ndarray, np.ndarray]], grain: int) -> bool:
    """Whether a part has written what another one has read or written. parts: what each has read
    and written. grain: bytes that count as one."""
    cells = [(_cells(reads, grain), _cells(writes, grain)) for reads, writes in parts]
    return any(
        _meet(writes, touched)
        for one, (_, writes) in enumerate(cells)
        for other, both in enumerate(cells)
        if other != one
        for touched in both
    )


def _cells(ranges: np.ndarray, grain: int) -> np.ndarray:
    low, high = ranges[:, 0] // grain * grain, -(-ranges[:, 1] // grain) * grain
    return _join(np.stack([low, high], 1))


class _Blind(Table):
    """Knows of no range."""

    def remember(self, low: int, high: int, writable: bool) -> None: ...


class Shared(Exception):
    """A write to memory that other processes have, too: it cannot be taken back."""


class WatchedMemory(GlobalMemory):
    """Global memory that records accesses from `watch` on."""

    _watched = False
    _shared: Sequence[tuple[int, int]] = ()

    def watch(self) -> None:
        """Before any CTA begins."""
        self.table = _Blind()
        self.read, self.written = Ranges(), Ranges()
        self._shared = _shared_mappings()
        self._watched = True

    def check(self, low: int, high: int, write: bool) -> bool:
        allowed = super().check(low, high, write)
        if allowed and self._watched:
            self._keep_apart(low, high, write)
            (self.written if write else self.read).add(low, high)
        return allowed

    def _check_each(self, addresses: np.ndarray, nbytes: int, write: bool) -> np.ndarray | None:
        kept = super()._check_each(addresses, nbytes, write)
        if self._watched:
            done = addresses if kept is None else addresses[kept]
            if done.size:
                self._keep_apart(int(done.min()), int(done.max()) + nbytes, write)
                (self.written if write else self.read).add_each(done, nbytes)
        return kept

    def read_together(self, first: int, offsets: np.ndarray, nbytes: int, extent: int) -> bool:
        allowed = super().read_together(first, offsets, nbytes, extent)
        if allowed and self._watched:
            self.read.add_box(first, offsets, nbytes)
        return allowed

    def _keep_apart(self, low: int, high: int, write: bool) -> None:
        if write and any(low < end and high > start for start, end in self._shared):
            raise Shared


def _shared_mappings() -> list[tuple[int, int]]:
    """Return writable mappings that this process shares with others."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, rights = line.split(" ", 2)[:2]
        if rights[1] == "w" and rights[3] == "s":
            low, _, high = where.partition("-")
            found.append((int(low, 16), int(high, 16)))
    return found


_TALK = "its CTAs touch what others write"
_INSTRUCTIONS = {
    "clusterlaunchcontrol": "its clusters take over the work of others (clusterlaunchcontrol)",
    "call": "it calls functions of the system, such as printf and malloc",
}
_WAIT = "its CTAs wait for others"
_POLL_SECONDS = 0.25
_PATIENCE = 200  # turns in a row that only polled, see `Scheduler`
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)


@dataclass
class _Part:
    """Report of a process on its clusters; `why` is the reason if it cannot be used."""

    why: str = ""
    reads: np.ndarray | None = None  # ranges, int64 (n, 2)
    writes: np.ndarray | None = None
    data: np.ndarray | None = None  # the bytes of `writes`, one behind the other
    counts: tuple[Any, ...] = ()
    checked: Any = None  # see `Checker.told`
    versions: tuple[Any, ...] = ()  # of blocks that it has executed


def run(machine: Machine, checker: Checker | None) -> Launch:
    """The launch of `machine`, which may be watched by `checker` alone, in as many processes as its
    options allow and its CTAs let it. Raises what `Machine.run` raises."""
    options, total = machine.options, machine.scheduler.total
    if options.processes == 1:
        return machine.run()
    began, count = time.perf_counter(), min(options.processes, total)
    why = _obstacle(machine, checker)
    if not why:
        parts = _parts(machine, checker, count)
        why = next((part.why for part in parts if part.why), "") or _verdict(parts, checker)
        if not why:
            _put_together(machine, checker, parts)
            report = machine.ended(time.perf_counter() - began)
            report.processes = count
            return report
        machine.scheduler.restart()
    report = machine.run()
    report.alone = why
    return report


def _obstacle(machine: Machine, checker: Checker | None) -> str:
    """Why processes cannot help, as far as that is known before."""
    if machine.scheduler.total == 1:
        return "it has one cluster"
    if machine.options.policy != "round-robin":
        return f"policy={machine.options.policy!r} mixes the warps of all CTAs by chance"
    if any(each is not checker for each in machine.listeners):
        return "somebody looks at it while it runs"
    roots = {each.root for each in machine.program.sites if each.opcode != "call.frame"}
    return next((why for root, why in _INSTRUCTIONS.items() if root in roots), "")


def _verdict(parts: list[_Part], checker: Checker | None) -> str:
    grain = checker.shadow.grain if checker else 1
    touched = [(part.reads, part.writes) for part in parts]
    return _TALK if talk(touched, grain) else ""  # type: ignore[arg-type]


# -- this process -----------------------------------------------------------------------------


def _parts(machine: Machine, checker: Checker | None, count: int) -> list[_Part]:
    """Return the report of each of `count` processes, or only the first unusable one."""
    total = machine.scheduler.total
    machine.program.prepare()  # once, instead of in each process
    edges = [total * k // count for k in range(count + 1)]
    done = np.frombuffer(_shared_words(count), np.int64)
    parts: dict[int, _Part] = {}
    with _children() as fork:
        ends = {
            fork(partial(_part, machine, checker, (edges[k], edges[k + 1]), done[k : k + 1])): k
            for k in range(count)
        }
        waiting = dict(ends)
        while waiting:
            for end in wait(list(waiting), _POLL_SECONDS):
                assert isinstance(end, Connection), "made here"
                part = _received(end)
                if part.why:
                    return [part]
                parts[waiting.pop(end)] = part
            try:
                machine.scheduler.elsewhere(int(done.sum()))
            except LimitExceeded:
                return [_Part("it takes longer than its limit")]  # as one process will say, if so
    return [parts[k] for k in range(count)]


def _shared_words(count: int) -> Any:
    """Zeros that this process shares with its children."""
    return mmap.mmap(-1, 8 * count)


def _received(end: Connection) -> _Part:
    try:
        found = pickle.loads(end.recv_bytes())
    except EOFError:
        return _Part("one of the processes died")
    assert isinstance(found, _Part)
    return found


@contextmanager
def _children() -> Iterator[Callable[[Callable[[], _Part]], Connection]]:
    """Gives a function that has a fork do something, and returns where its answer comes from. Those
    that still run at the end of the block are killed."""
    running: list[tuple[int, Connection]] = []

    def fork(work: Callable[[], _Part]) -> Connection:
        mine, its = Pipe(duplex=False)
        with warnings.catch_warnings():  # of threads: a child executes numpy and our own code alone
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if not child:
            _live_and_die(work, its)
        its.close()
        running.append((child, mine))
        return mine

    try:
        yield fork
    finally:
        for child, end in running:
            end.close()
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _put_together(machine: Machine, checker: Checker | None, parts: list[_Part]) -> None:
    memory = machine.memory.views[1]
    for part in parts:
        assert part.writes is not None, "of no use"
        assert part.data is not None, "of no use"
        offset = 0
        for low, high in part.writes.tolist():
            memory[low - FIRST_ADDRESS : high - FIRST_ADDRESS] = part.data[
                offset : offset + high - low
            ]
            offset += high - low
        machine.add_counts(*part.counts)
        machine.program.awaited.update(part.versions)
        if checker:
            checker.add(part.checked)


# -- a child ----------------------------------------------------------------------------------


class _Found(Exception):
    """A finding occurred; a run in one process has to determine the first CTA with it."""


def _stop(_: str, what: Finding | str) -> None:
    if isinstance(what, Finding):
        raise _Found


def _live_and_die(work: Callable[[], _Part], end: Connection) -> None:
    """Answer from a child process, which ends without the process's usual cleanup."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        gc.freeze()
        end.send_bytes(pickle.dumps(work(), protocol=5))
    finally:
        os._exit(0)


def _part(
    machine: Machine, checker: Checker | None, clusters: tuple[int, int], done: np.ndarray
) -> _Part:
    memory, scheduler = machine.memory, machine.scheduler
    assert isinstance(memory, WatchedMemory), "`Module` makes one for several processes"
    memory.watch()

    def progress(finished: int, _: int) -> None:
        done[0] = finished - clusters[0]

    watch.heard_alone(_stop)
    scheduler.options = replace(scheduler.options, limit=None, progress=progress)
    scheduler.launched = scheduler.finished = clusters[0]
    scheduler.total = clusters[1]
    scheduler.patience = _PATIENCE
    try:
        machine.run()
    except _Found:
        return _Part("the checker has something to tell")
    except Shared:
        return _Part("it writes to memory that is shared with other processes")
    except Deadlock:
        return _Part(_WAIT)
    except BaseException as error:  # noqa: BLE001  (whatever it is, one process will tell of it)
        return _Part(f"{type(error).__name__} in one of the processes")
    if checker and checker.coverage.repeated:
        return _Part("the checker has something to tell")
    if scheduler.released_at >= 0:
        return _Part(_WAIT)
    done[0] = clusters[1] - clusters[0]
    writes, bytes_ = memory.written.joined(), memory.views[1]
    data = [bytes_[a - FIRST_ADDRESS : b - FIRST_ADDRESS] for a, b in writes.tolist()]
    return _Part(
        reads=memory.read.joined(),
        writes=writes,
        data=np.concatenate([np.empty(0, np.uint8), *data]),
        counts=machine.counted(),
        checked=checker.told() if checker else None,
        versions=tuple(machine.program.versions),
    )
