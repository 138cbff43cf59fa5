"""Runs the steps of a bring-up: each a process of its own, checks several at a time."""

from __future__ import annotations

import argparse
import importlib.util
import platform
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from workbench.bringup import gpu, watch
from workbench.bringup.session import BAD, NOT_RUN, SKIPPED, Record, Session, identity_of
from workbench.bringup.steps import FOLDER, JSON, Step
from workbench.common import environment
from workbench.house.source import ROOT

GONE, INTERRUPTED = 3, 130  # exit codes
WRITTEN = {"PYTHONUNBUFFERED": "1", "COLUMNS": "120"}  # of what goes into a log
# A line that is written over says nothing in a log.
TERMINAL = sys.stderr.isatty()
BEGIN, WIDTH = "\r\033[K" * TERMINAL, 100
TICK = 0.5  # seconds


def is_unexpected(row: Mapping[str, Any]) -> bool:
    """Whether a step did not pass, or passed with a fault that was planted in it."""
    if row["verdict"] == NOT_RUN:
        return False
    return (row["verdict"] in BAD) != bool(row["planted"])


class GpuIsGone(Exception):
    """What it got that asked the GPU for a sum."""


@dataclass
class BringUp:
    """A run over steps."""

    session: Session
    arch: str
    options: argparse.Namespace
    plants: dict[str, str]
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self, steps: Sequence[Step]) -> int:
        """All of them; 0, or the exit code of what ended it early."""
        for number in (signal.SIGTERM, signal.SIGHUP):  # as by a closed terminal: ends the step too
            signal.signal(number, signal.default_int_handler)
        places = {step.name: f"[{number:3}/{len(steps)}]" for number, step in enumerate(steps, 1)}
        try:
            for checks, block in groupby(steps, lambda step: step.checks):
                jobs = self.options.jobs if checks else 1
                bad = self._run(list(block), jobs, places)
                if jobs > 1:  # it may be its neighbours' fault
                    self._run(bad, 1, places, once_more=True)
        except KeyboardInterrupt:
            _say("interrupted; the same command goes on here\n")
            return INTERRUPTED
        except GpuIsGone as said:
            _say(f"the GPU does not answer: {said}. Reset it or reboot, and give the same "
                 "command: it goes on with the next step\n")  # fmt: skip
            return GONE
        return 0

    def _run(
        self, steps: Sequence[Step], jobs: int, places: Mapping[str, str], once_more: bool = False
    ) -> list[Step]:
        """So many at a time, in their order; those that are not as they should be."""
        bad, start = [], time.monotonic()
        known = {step.name: self.session.known(step.name) for step in steps}
        with ThreadPoolExecutor(jobs) as pool:
            left = {pool.submit(self.step, step, once_more): step for step in steps}
            try:
                while left:
                    done, _ = wait(left, TICK, FIRST_COMPLETED)
                    for future in done:
                        step, record = left.pop(future), future.result()
                        _say(f"{BEGIN}{places[step.name]} {step.name:28} {record.verdict:8} "
                             f"{record.seconds:7.1f} s{', alone' * once_more}\n")  # fmt: skip
                        if record.verdict in BAD and record != known[step.name]:
                            bad += [step] * is_unexpected(vars(record))
                            if not (step.on_host or self.options.emulate):
                                self._ask_the_gpu()
                    if TERMINAL and left:
                        running = [step.name for future, step in left.items() if future.running()]
                        passed = time.monotonic() - start
                        _say(f"{BEGIN}{passed:5.0f} s: {', '.join(running)}"[: WIDTH + len(BEGIN)])
            except BaseException:
                self.stop.set()
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        return bad

    def _ask_the_gpu(self) -> None:
        said = gpu.answers()
        if said:
            raise GpuIsGone(said)

    def step(self, step: Step, once_more: bool = False) -> Record:
        """Run a step, where it has no record of now."""
        reason = self.why_not(step)
        if reason:
            record = Record(step.name, SKIPPED, reason, when=_now())
            if self.session.known(step.name) is None or self.plants.get(step.name):
                self.session.keep(record)
            return record
        words = step.command(self.arch, emulate=self.options.emulate, places=self._places(step))
        planted = self.plants.get(step.name, "")
        # With the places' names in it: a folder may be moved to another machine, and goes on there.
        named = step.command(self.arch, emulate=self.options.emulate, places={})
        identity = identity_of([*named, planted])
        known = self.session.known(step.name)
        if known and known.identity == identity and not (once_more or self._again(known)):
            return known
        self.session.place(step.name, "json").unlink(missing_ok=True)
        wrapped = ["-m", "workbench.bringup.planted", planted, "--", *words] if planted else words
        before = {} if self.options.emulate else gpu.state()
        ended = watch.run(
            [sys.executable, *wrapped], self.session.place(step.name, "log"),
            self.options.limit or step.seconds, env=environment() | WRITTEN, cwd=ROOT,
            tick=self._end_with_the_others,
        )  # fmt: skip
        after = {} if self.options.emulate else gpu.state()
        record = Record(
            step.name, ended.verdict, ended.tail, round(ended.seconds, 2), ended.code,
            shlex.join(["python", *wrapped]), {"before": before, "after": after}, planted,
            identity, _now(),
        )  # fmt: skip
        self.session.keep(record)
        return record

    def _end_with_the_others(self, _: float) -> None:
        if self.stop.is_set():
            raise KeyboardInterrupt

    def why_not(self, step: Step) -> str:
        """Why a step is left out here; '' where it is run."""
        if self.options.quick and not step.quick and not self.options.only:
            return "not among the quick ones"
        if self.options.no_peers and step.peers:
            return "no times of other libraries were asked for"
        if self.options.emulate and step.why_not:
            return f"not emulated: {step.why_not}"
        if step.needs and not self.options.emulate and shutil.which(step.needs) is None:
            return f"{step.needs} is not installed"
        missing = [name for name in step.modules if not _is_there(name)]
        return f"the package {missing[0]} is not installed" if missing else ""

    def head(self) -> dict[str, Any]:
        """What the document begins with."""
        here = self.session.figures("doctor.here") or {}
        gpus = here.get("gpus") or [{}]
        name = "emulator" if self.options.emulate else gpus[0].get("name", "GPU")
        return {"date": time.strftime("%Y-%m-%d"), "arch": self.arch, "gpu": {"name": name},
                "emulated": self.options.emulate, "versions": here.get("packages", {}),
                "driver": here.get("driver"), "system": platform.system()}  # fmt: skip

    def _again(self, known: Record) -> bool:
        again = self.options.again
        return again == "all" or (again == "bad" and known.verdict != watch.PASSED)

    def _places(self, step: Step) -> dict[str, str]:
        folder = self.session.folder.resolve()
        return {JSON: str(folder / f"{step.name}.json"), FOLDER: str(folder)}


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False


def _say(words: str) -> None:
    print(words, end="", file=sys.stderr, flush=True)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S")
