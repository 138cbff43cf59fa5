"""What bringup.py does: the steps that are asked for, one behind the other, then file and page."""

from __future__ import annotations

import argparse
import importlib.util
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from workbench.bringup import gpu, watch, where
from workbench.bringup.bundle import pack
from workbench.bringup.page import save
from workbench.bringup.planted import KINDS
from workbench.bringup.session import BAD, NOT_RUN, SKIPPED, Record, Session, identity_of
from workbench.bringup.steps import ARCHS, FOLDER, GROUPS, JSON, Step, steps_of
from workbench.common import environment, refuse
from workbench.house.source import ROOT
from workbench.tables import show, table

OUT = Path("out/bringup")
GONE, INTERRUPTED = 3, 130  # exit codes
WRITTEN = {"PYTHONUNBUFFERED": "1", "COLUMNS": "120"}  # of what goes into a log
COLUMNS = (
    ("step", "{name}"), ("", "{verdict}"), ("seconds", "{seconds:.1f}"),
    ("", lambda row: row["about"][row["about"].rfind("\n") + 1 :][:90] * (row["verdict"] in TOLD)),
)  # fmt: skip
TOLD = (*BAD, SKIPPED, "refused")  # whose reason stands in the table
# A line that is written over says nothing in a log.
TERMINAL = sys.stderr.isatty()
BEGIN, WIDTH = "\r\033[K" * TERMINAL, 100
TICK = 0.5  # seconds


def perform(options: argparse.Namespace) -> int:
    """What the flags ask for; the exit code."""
    if options.table:
        text = where.README.read_text(encoding="utf-8")
        where.README.write_text(where.with_table(text, where.documents()), encoding="utf-8")
        return 0
    arch = options.arch or (ARCHS[0] if options.emulate else _arch_here())
    if arch not in ARCHS:
        return refuse(f"no GPU of {', '.join(ARCHS)} here ({arch or 'none'}): --emulate rehearses")
    if options.emulate and arch == "sm_103a":
        return refuse("--emulate: its kernels are those of sm_100a, which is what can be emulated")
    try:
        steps = chosen(steps_of(arch), options.only)
        plants = plants_of(options.plant, steps)
    except ValueError as error:
        return refuse(error)
    if options.list:
        rows = [{"name": step.name, "words": step.words, "quick": "quick" * step.quick,
                 "seconds": step.seconds} for step in steps]  # fmt: skip
        columns = (("step", "{name}"), ("", "{quick}"), ("limit", "{seconds} s"), ("", "{words}"))
        show(*table(f"bring-up of {arch}", columns, rows))
        return 0
    session = Session(options.folder or OUT / (arch + "-emulated" * options.emulate))
    bring_up = BringUp(session, arch, options, plants)
    code = 0
    if not options.bundle:
        code = bring_up.run(steps)
    everything = steps_of(arch)
    document = session.document(everything, bring_up.head())
    rows = [row for row in document["steps"] if row["verdict"] != NOT_RUN or row["about"]]
    named = {step.name for step in steps}
    mine = [row for row in rows if row["name"] in named]
    show(*table(f"bring-up of {arch}", COLUMNS, mine))
    paths = save(document, session.folder)
    if options.bundle:
        paths.append(pack(session, document))
    print("\n".join(f"wrote {path}" for path in paths))
    return code or int(any(map(is_unexpected, mine)))


def is_unexpected(row: Mapping[str, Any]) -> bool:
    """Whether a step did not pass, or passed with a fault that was planted in it."""
    if row["verdict"] == NOT_RUN:
        return False
    return (row["verdict"] in BAD) != bool(row["planted"])


def chosen(steps: Sequence[Step], names: Sequence[str]) -> list[Step]:
    """Those of groups and names, or all. ValueError for a name that is none."""
    known = {step.name for step in steps} | {*GROUPS}
    for name in names:
        if name not in known:
            raise ValueError(f"--only {name}: a group ({', '.join(GROUPS)}) or a step (--list)")
    return [step for step in steps if not names or {step.name, step.group} & {*names}]


def plants_of(words: Sequence[str], steps: Sequence[Step]) -> dict[str, str]:
    """Step -> the fault. ValueError for another kind, or a step that is not run."""
    found = {}
    for word in words:
        kind, _, name = word.partition("=")
        if kind not in KINDS or name not in {step.name for step in steps}:
            raise ValueError(f"--plant {word}: one of {', '.join(KINDS)}, =, and a step (--list)")
        found[name] = kind
    return found


def _arch_here() -> str:
    """Of the GPU that torch sees; '' without one. Another process asks: a context that this one had
    would keep a GPU that hangs from being reset."""
    asked = "from workbench.place import native_arch; print(native_arch() or '')"
    said = subprocess.run(
        [sys.executable, "-c", asked], env=environment(), stdout=subprocess.PIPE, text=True,
        timeout=gpu.PROBE_SECONDS, check=False,
    )  # fmt: skip
    return said.stdout.strip()


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
