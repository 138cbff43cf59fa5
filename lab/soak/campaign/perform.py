"""What `soak.py NAME` does: random problems for random kernels, as many as there is time for."""

from __future__ import annotations

import argparse
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from kernelkit.compile.arch import written_for
from lab.measure.timing import setting
from lab.problems.draws import Draws, Kernel
from lab.soak.campaign.compiled import compiled
from lab.soak.campaign.family import Family
from lab.soak.campaign.record import Failure, Record
from lab.soak.campaign.trial import WAYS, Trial, run_together
from lab.tools import tables
from lab.tools.common import describe, refuse, write_json
from lab.tools.place import Place, choose_place

FAILED = 1  # exit code
OUT = Path("out")
PATIENCE = 100.0  # seconds of a problem; a kernel that waits for ever never comes back by itself
REASONS = 8  # why kernels are refused, of which the file of --json has all
TOGETHER = 4  # problems on streams of their own
DEFAULTS = {"cuda": ("usual", 60, 3000), "emulate": ("small", 4, 8)}  # size, kernels, problems


class Broken(RuntimeError):
    """The GPU takes no more work from this process."""


@dataclass
class Soak:
    """A run; waiting: trials that will be run together."""

    family: Family
    options: argparse.Namespace
    place: Place
    draws: Draws
    record: Record
    ends: float
    waiting: list[tuple[str, Trial]]

    @property
    def failures(self) -> Path:
        """Where they are written down."""
        return OUT / f"soak_{self.family.name}_failures.json"

    @property
    def seconds_left(self) -> float:
        return self.ends - time.monotonic()

    def run(self, kernel: Kernel, numbers: Sequence[int]) -> None:
        """Problems of a kernel, while there is time."""
        for number in numbers:
            if self.seconds_left <= 0:
                return
            case = self.draws.problem(kernel, number)
            with self._patience(f"{kernel.number}.{number}", case):
                self._problem(f"{kernel.number}.{number}", case)

    def _problem(self, name: str, case: Any) -> None:
        wrong, reports = [], []
        try:
            trial = self.family.trial(case, self.place)
            if not trial.repeats():
                wrong.append(trial.differs)
            reports = trial.reports()
            wrong += [str(report) for report in reports if not report.ok]
            for way, (same, words) in WAYS.items():
                if getattr(self.options, way) and not same(trial):
                    wrong.append(words)
            if self.options.streams:
                self._run_together(name, trial)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a failure
            wrong.append(f"{type(error).__name__}: {error}")
        self.record.add(case, reports, failed=bool(wrong))
        if wrong:
            self.fail([name], repr(case), wrong)
            self._require_gpu()

    def _run_together(self, name: str, trial: Trial) -> None:
        self.waiting.append((name, trial))
        if len(self.waiting) < min(TOGETHER, len(self.options.problem) or TOGETHER):
            return
        names, trials = zip(*self.waiting, strict=True)
        self.waiting.clear()
        for same, one in zip(run_together(trials), trials, strict=True):
            if not same:
                self.fail([*names], repr(one.case), ["bits differ beside other streams"])

    def _require_gpu(self) -> None:
        if self.place.backend == "cuda":
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:
                raise Broken(str(error).partition("\n")[0]) from error

    @contextmanager
    def _patience(self, name: str, case: Any) -> Iterator[None]:
        """Ends the process if the block takes too long: nothing else stops a kernel that waits."""

        def end() -> None:
            self.fail([name], repr(case), [f"has not ended within {PATIENCE:.0f} s"])
            finish(self)
            sys.stdout.flush()
            os._exit(FAILED)

        timer = threading.Timer(PATIENCE, end)
        timer.daemon = True
        if self.place.backend == "cuda":
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def fail(self, names: list[str], case: str, wrong: list[str]) -> None:
        """Say it, and how to see it again, and write it down at once."""
        failure = Failure(names, self.command(names), case, wrong)
        self.record.failures.append(failure)
        print(failure, flush=True)
        write_json(self.failures, [asdict(one) for one in self.record.failures])

    def command(self, names: Sequence[str]) -> str:
        """That runs these problems again."""
        options = self.options
        words = [f"python scripts/soak.py {self.family.name}", f"--seed {options.seed}"]
        words += [f"--problem {' '.join(names)}"]
        words += [f"--{options.size}"] * bool(options.size)
        words += [f"--{way}" for way in (*WAYS, "streams") if getattr(options, way)]
        if self.place.backend == "emulate":
            words.append(f"--backend emulate --arch {self.place.arch}")
        return " ".join(words)


def perform(family: Family, options: argparse.Namespace) -> int:
    try:
        place = choose_place(options, family.archs)
    except ValueError as refused:
        return refuse(refused)
    if written_for(place.arch) not in family.archs:
        return refuse(f"--arch {place.arch}: these kernels are written for {family.archs}")
    if place.backend != "cuda" and (options.graphs or options.streams):
        return refuse(f"--graphs and --streams want a GPU: {place.reason}")
    size, count, problems = DEFAULTS[place.backend]
    draws = family.draws(options.seed, place.arch, family.sizes[options.size or size])
    ends = time.monotonic() + 60 * options.minutes
    record = Record(family.features, family.errors)
    soak = Soak(family, options, place, draws, record, ends, [])
    save(soak)  # what cannot be written is better known now
    print(f"{place} ({place.reason}), seed {options.seed}", flush=True)
    try:
        if options.problem:
            named(soak)
        else:
            kernels = [*islice(draws.kernels(), options.configs or count)]
            drawn(soak, kernels, options.problems or problems)
    except ValueError as refused:
        return refuse(refused)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    except Broken as error:
        print(f"stopped, since the GPU takes no more work from this process: {error}", flush=True)
    return finish(soak)


def named(soak: Soak) -> None:
    """The problems of --problem."""
    for number, problem in soak.options.problem:
        kernel = soak.draws.kernel(number)
        if kernel is None:
            reason, *_ = soak.draws.refused
            raise ValueError(f"--problem {number}.{problem}: kernel {number} is refused: {reason}")
        soak.run(kernel, [problem])
    soak.record.kernels = len({number for number, _ in soak.options.problem})


def drawn(soak: Soak, kernels: Sequence[Kernel], problems: int) -> None:
    """As many problems of each kernel, as soon as it is compiled."""
    each = range(math.ceil(problems / len(kernels)))
    for kernel, seconds, wrong in _ready(soak, kernels, each):
        record = soak.record
        record.kernels += 1
        record.compile_seconds += seconds
        if wrong:
            soak.fail([f"{kernel.number}.0"], repr(kernel.config), [wrong])
            continue
        before, began = record.problems, time.monotonic()
        soak.run(kernel, each)
        count, took = record.problems - before, time.monotonic() - began
        print(
            f"[{record.kernels}/{len(kernels)}] compiled in {seconds:.1f} s, {count} problems in "
            f"{took:.1f} s: {describe(kernel.config)}",
            flush=True,
        )
        if soak.seconds_left <= 0:
            break
    if soak.seconds_left <= 0:
        print("--minutes are over", flush=True)


def _ready(
    soak: Soak, kernels: Sequence[Kernel], each: Sequence[int]
) -> Iterator[tuple[Kernel, float, str]]:
    """By processes of their own; with one job, and in the emulator, by the first call."""
    if soak.options.jobs == 1 or soak.place.backend == "emulate":
        return ((kernel, 0.0, "") for kernel in kernels)
    draws, options = soak.draws, soak.options
    return compiled(kernels, lambda one: draws.keys(one, each), options.jobs, soak.seconds_left)


def finish(soak: Soak) -> int:
    """The summary, and the figures of --json; returns the exit code."""
    record, refused = soak.record, soak.draws.refused
    tables.show(*record.table())
    print(
        f"{record.problems:,} problems of {record.kernels} kernels, {len(record.failures)} failed; "
        f"{record.seconds:.0f} s, and {record.compile_seconds:.0f} s of processes that compile\n"
        f"{refused.total()} kernels were drawn that {soak.place.arch} refuses"
        + "".join(f"\n    {n} x {why}" for why, n in refused.most_common(REASONS))
    )
    if record.failures:
        print(f"failures: {soak.failures}")
    save(soak)
    return FAILED if record.failures else 0


def save(soak: Soak) -> None:
    """What --json asks for, as far as it is known."""
    record = soak.record
    if soak.options.json:
        document = {
            "setting": setting(), "place": str(soak.place), "seed": soak.options.seed,
            "kernels": record.kernels, "seconds": record.seconds,
            "compile_seconds": record.compile_seconds,
            "refused": soak.draws.refused, "features": record.rows(),
            "failures": [asdict(failure) for failure in record.failures],
        }  # fmt: skip
        write_json(soak.options.json, document)
