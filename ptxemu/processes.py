"""The CTAs of one launch in several processes (`Options.processes`): speculation, then a proof.

Each process is a fork that runs a row of neighbouring clusters on its own copy of memory, and notes
which bytes it reads and writes. If it ends without an error or a finding, and no process has
written what another one has touched, no order of the clusters makes a difference: what they have
written and counted is put together in the order of the clusters. Else nothing of it is used, and
the launch runs in this process, whose memory nobody has touched so far.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import numpy as np

from ptxemu import watch
from ptxemu.check.checker import Checker
from ptxemu.errors import Deadlock, LimitExceeded
from ptxemu.findings import Finding, Launch
from ptxemu.machine.machine import Machine
from ptxemu.machine.memory import FIRST_ADDRESS
from ptxemu.machine.touched import Shared, WatchedMemory, talk

_TALK = "its CTAs touch what others write"
_INSTRUCTIONS = {
    "clusterlaunchcontrol": "its clusters take over the work of others (clusterlaunchcontrol)",
    "call": "it prints",
}
_WAIT = "its CTAs wait for others"
_POLL_SECONDS = 0.25
_PATIENCE = 200  # turns in a row that only polled, see `Scheduler`
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)


@dataclass
class _Part:
    """What a process has to tell of its clusters. why: it is of no use."""

    why: str = ""
    reads: np.ndarray | None = None  # ranges, int64 (n, 2)
    writes: np.ndarray | None = None
    data: np.ndarray | None = None  # the bytes of `writes`, one behind the other
    counts: tuple[Any, ...] = ()
    checked: Any = None  # see `Checker.told`


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
    roots = {instr.root for instr in machine.program.sites}
    return next((why for root, why in _INSTRUCTIONS.items() if root in roots), "")


def _verdict(parts: list[_Part], checker: Checker | None) -> str:
    grain = checker.shadow.grain if checker else 1
    touched = [(part.reads, part.writes) for part in parts]
    return _TALK if talk(touched, grain) else ""  # type: ignore[arg-type]


# -- this process -----------------------------------------------------------------------------


def _parts(machine: Machine, checker: Checker | None, count: int) -> list[_Part]:
    """What each of `count` processes has to tell; or, as soon as one is of no use, that one."""
    total = machine.scheduler.total
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
        if checker:
            checker.add(part.checked)


# -- a child ----------------------------------------------------------------------------------


class _Found(Exception):
    """A finding: which CTA shows it first, one process will tell."""


def _stop(_: str, what: Finding | str) -> None:
    if isinstance(what, Finding):
        raise _Found


def _live_and_die(work: Callable[[], _Part], end: Connection) -> None:
    """In a child: it answers, and ends without any of the process's own endings."""
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
    )
