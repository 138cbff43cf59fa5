"""Processes that run a script again and again, one mutant at a time; one that dies is replaced."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

from ptxemu.mutation.rerun import CRASH, DEADLOCK, Baseline, Verdict

Task = tuple[str, Mapping[int, str]]  # (digest of the kernel, its changed lines)
_SPAWN = get_context("spawn")


class Worker:
    """A process with the script; it does one thing at a time."""

    def __init__(self, options: argparse.Namespace, schedules: Mapping[str, Any]) -> None:
        self._start = (options, schedules)
        self.began = 0.0
        self.task: Any = None
        self._launch()

    def _launch(self) -> None:
        self.connection, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_serve, args=(theirs, *self._start), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, task: Any, words: tuple[Any, ...]) -> None:
        self.task, self.began = task, time.monotonic()
        self.connection.send(words)

    def result(self) -> Any:
        """Return the answer; a process that died or has to `end` is replaced."""
        try:
            return self.connection.recv()
        except EOFError:
            self._process.join(5)
            code = self._process.exitcode
            self.restart()
            return Verdict(CRASH, f"the process ended with {code}", "", self.seconds)

    @property
    def seconds(self) -> float:
        return round(time.monotonic() - self.began, 2)

    def restart(self) -> None:
        self.end()
        self._launch()

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self.connection.close()


def first_run(options: argparse.Namespace, schedules: Mapping[str, Any]) -> Baseline:
    """The script as it is, in a process of its own."""
    worker = Worker(options, schedules)
    try:
        worker.send(None, ("baseline",))
        found = worker.result()
    finally:
        worker.end()
    return found if isinstance(found, Baseline) else Baseline(failure=found.how)


def judged(
    options: argparse.Namespace,
    schedules: Mapping[str, Any],
    tasks: Sequence[Any],
    task_of: Callable[[Any], Task],
    known: set[tuple[Any, ...]],
    patience: float,
) -> Iterator[tuple[Any, Verdict]]:
    """(item, verdict) of each of `tasks` as they come. patience: seconds after which a process is
    taken for stuck."""
    waiting = [*reversed(tasks)]
    workers = [Worker(options, schedules) for _ in range(min(options.jobs, len(tasks)))]
    try:
        for worker in workers:
            item = waiting.pop()
            worker.send(item, ("mutant", *task_of(item), known))
        busy = [*workers]
        while busy:
            ready = wait([worker.connection for worker in busy], timeout=1.0)
            for worker in [*busy]:
                if worker.connection in ready:
                    verdict = worker.result()
                elif worker.seconds > patience:
                    verdict = Verdict(DEADLOCK, "the script does not end", "", worker.seconds)
                    worker.restart()
                else:
                    continue
                yield worker.task, verdict
                if waiting:
                    item = waiting.pop()
                    worker.send(item, ("mutant", *task_of(item), known))
                else:
                    busy.remove(worker)
    finally:
        for worker in workers:
            worker.end()


def _serve(
    connection: Connection, options: argparse.Namespace, schedules: Mapping[str, Any]
) -> None:
    """The process: what the script prints is nobody's business here."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    from ptxemu.commands.subject import failure_of, subject_of
    from ptxemu.host.command_line import source_lines
    from ptxemu.host.emulator import Emulator
    from ptxemu.host.gpu_machine import machine_with_gpu
    from ptxemu.mutation.rerun import baseline, verdict
    from ptxemu.schedules import Schedule

    with source_lines(), machine_with_gpu(Emulator(), options.gpu):
        try:
            subject = subject_of(options)
        except Exception as error:  # noqa: BLE001  (of the file's own code)
            connection.recv()
            connection.send(Baseline(failure=f"{type(error).__name__}: {error}"))
            return

        def run() -> str:
            return failure_of(subject, Schedule(), quiet=True)

        while True:
            try:
                what, *words = connection.recv()
            except EOFError:
                return
            if what == "baseline":
                connection.send(baseline(run, [*schedules.values()]))
            else:
                kernel, lines, known = words
                connection.send(verdict(run, kernel, lines, schedules, known))
