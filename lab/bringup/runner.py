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
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from lab.bringup import gpu, watch
from lab.bringup.session import BAD, Record, Session, identity_of
from lab.bringup.steps import ANY, FOLDER, JSON, Lane, Step, rounds_of
from lab.bringup.watch import WRONG
from lab.house.source import ROOT
from lab.tools.bringup_words import NOT_RUN, SKIPPED
from lab.tools.common import environment

GONE, INTERRUPTED = 3, 130  # exit codes
WRITTEN = {"PYTHONUNBUFFERED": "1", "COLUMNS": "120"}  # of what goes into a log
# A line that is written over says nothing in a log.
TERMINAL = sys.stderr.isatty()
BEGIN, WIDTH = "\r\033[K" * TERMINAL, 100
TICK = 0.5  # seconds
LONG = 240.0  # of a step that is wrong


def is_unexpected(row: Mapping[str, Any]) -> bool:
    """Whether a step did not pass, or passed with a fault that was planted in it."""
    if row["verdict"] == NOT_RUN:
        return False
    return (row["verdict"] in BAD) != bool(row["planted"])


def may_be_the_neighbours(record: Record) -> bool:
    """Whether a step that did not pass beside others is to run again alone. What was wrong after
    minutes has said which problems are."""
    return is_unexpected(vars(record)) and (record.verdict != WRONG or record.seconds < LONG)


class GpuIsGone(Exception):
    """The GPU no longer answers; the message is what the probe kernel failed with."""


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
            for lanes in rounds_of(steps, self.options.jobs, self.options.gpus):
                bad = self._run(lanes, places)
                if len(lanes) > 1 or lanes[0].jobs > 1:
                    for step, which in bad:
                        self._run([Lane([step], 1, [which])], places, once_more=True)
        except KeyboardInterrupt:
            _say("interrupted; the same command resumes here\n")
            return INTERRUPTED
        except GpuIsGone as said:
            _say(f"the GPU does not answer: {said}. Reset it or reboot, and give the same "
                 "command: it goes on with the next step\n")  # fmt: skip
            return GONE
        return 0

    def _run(
        self, lanes: Sequence[Lane], places: Mapping[str, str], once_more: bool = False
    ) -> list[tuple[Step, str]]:
        """Side by side; those that are to run again, and on which GPU."""
        bad, start = [], time.monotonic()
        with ExitStack() as stack:
            left = {}
            for lane in lanes:
                pool = stack.enter_context(ThreadPoolExecutor(lane.jobs))
                left |= {pool.submit(self._on_a_gpu, step, lane, once_more): step
                         for step in lane.steps}  # fmt: skip
            try:
                while left:
                    done, _ = wait(left, TICK, FIRST_COMPLETED)
                    for future in done:
                        step, (record, which, gone) = left.pop(future), future.result()
                        _say(f"{BEGIN}{places[step.name]} {step.name:28} {record.verdict:8} "
                             f"{record.seconds:7.1f} s{', alone' * once_more}\n")  # fmt: skip
                        if gone is not None:
                            bad += [(step, which)] * may_be_the_neighbours(record)
                        if gone:
                            raise GpuIsGone(gone)
                    if TERMINAL and left:
                        running = [step.name for future, step in left.items() if future.running()]
                        passed = time.monotonic() - start
                        _say(f"{BEGIN}{passed:5.0f} s: {', '.join(running)}"[: WIDTH + len(BEGIN)])
            except BaseException:
                self.stop.set()
                for future in left:
                    future.cancel()
                raise
        return bad

    def _on_a_gpu(self, step: Step, lane: Lane, once_more: bool) -> tuple[Record, str, str | None]:
        """(what came of it, on which GPU, and where it is bad since now what is wrong with that:
        '' for nothing)."""
        which, known = lane.free.get(), self.session.known(step.name)
        try:
            record = self.step(step, which, once_more)
            if record.verdict not in BAD or record == known:
                return record, which, None
            asked = not (step.on_host or self.options.emulate)
            return record, which, gpu.answers(which) if asked else ""
        finally:
            lane.free.put(which)

    def step(self, step: Step, which: str = ANY, once_more: bool = False) -> Record:
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
        wrapped = ["-m", "lab.bringup.planted", planted, "--", *words] if planted else words
        before = {} if self.options.emulate else gpu.state(which)
        ended = watch.run(
            [sys.executable, *wrapped], self.session.place(step.name, "log"),
            self.options.limit or step.seconds, cwd=ROOT, tick=self._end_with_the_others,
            env=environment() | WRITTEN | gpu.seen(which),
        )  # fmt: skip
        after = {} if self.options.emulate else gpu.state(which)
        record = Record(
            step.name, ended.verdict, ended.tail, round(ended.seconds, 2), ended.code,
            shlex.join(["python", *wrapped]),
            {"seen": which, "before": before, "after": after}, planted, identity, _now(),
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
        """Return the head of the document. Files are named after the GPU, also in a run without
        the doctor's step."""
        here = self.session.figures("doctor.here") or {}
        name = "emulator" if self.options.emulate else self._name_of_gpu(here)
        return {"date": time.strftime("%Y-%m-%d"), "arch": self.arch, "gpu": {"name": name},
                "emulated": self.options.emulate, "versions": here.get("packages", {}),
                "driver": here.get("driver"), "system": platform.system()}  # fmt: skip

    def _name_of_gpu(self, here: dict[str, Any]) -> str:
        """Return what the doctor found, else what `gpu.name` does; 'GPU' without both."""
        for found in here.get("gpus") or ():
            return found["name"]
        return gpu.name(next(iter(self.options.gpus), ANY)) or "GPU"

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
