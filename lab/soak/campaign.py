"""A campaign: random problems of a family of kernels, natively or in the emulator, and what is
counted of them.

Kernels compile in processes of their own, which leave them in the cache on disk. Each problem runs
twice, and again in other ways that have to give the same bits."""

from __future__ import annotations

import argparse
import gc
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import torch

from kernelkit.call.launch import emulation
from kernelkit.compile import store
from kernelkit.compile.arch import written_for
from kernelkit.compile.compiler import forget
from kernelkit.compile.keys import KernelKey
from kernelkit.compile.warm import ready
from kernelkit.numerics import tolerance
from lab.measure.accuracy import share
from lab.measure.timing import setting
from lab.problems.attention import POLICIES, same_bits
from lab.problems.draws import Draws, Kernel
from lab.tools import tables
from lab.tools.common import describe, refuse, write_json
from lab.tools.place import Place, choose_place, poisoned_outputs
from lab.tools.tables import Table, table
from ptxemu import Options

Feature = Callable[[Any], object]

COLUMNS = (
    ("problems with", "{feature}"), ("number", "{problems:,}"), ("failed", "{failed}"),
)  # fmt: skip


@dataclass
class Tally:
    """shares: the largest errors, by report, as shares of their tolerance."""

    problems: int = 0
    failed: int = 0
    shares: dict[str, float] = field(default_factory=dict)


@dataclass
class Failure:
    """A failure.

    problems: names of the problems.
    command: command that repeats it.
    case: the first problem.
    wrong: what was wrong."""

    problems: list[str]
    command: str
    case: str
    wrong: list[str]

    def __str__(self) -> str:
        return "\n    ".join([f"FAILED {self.command}", self.case, *self.wrong])


@dataclass
class Record:
    """Record of a soak.

    features: features by which problems are counted.
    errors: names of reports -> their labels where shares are printed."""

    features: Mapping[str, Feature]
    errors: Mapping[str, str]
    failures: list[Failure] = field(default_factory=list)
    kernels: int = 0
    compile_seconds: float = 0.0
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.tallies = {name: Tally() for name in ("all", *self.features)}

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def problems(self) -> int:
        return self.tallies["all"].problems

    def add(self, case: Any, reports: Sequence[tolerance.Report], *, failed: bool) -> None:
        """A problem that was run; without reports where it could not be judged."""
        shares = {report.name: share(report) for report in reports if report.name in self.errors}
        for name, tally in self.tallies.items():
            if name == "all" or self.features[name](case):
                tally.problems += 1
                tally.failed += failed
                for error, value in shares.items():
                    tally.shares[error] = max(tally.shares.get(error, 0.0), value)

    def rows(self) -> list[dict]:
        """Rows of the features that occurred."""
        return [
            {
                "feature": name,
                "problems": tally.problems,
                "failed": tally.failed,
                **{key: tally.shares.get(error, 0.0) for error, key in self.errors.items()},
            }
            for name, tally in self.tallies.items()
            if tally.problems
        ]

    def table(self) -> Table:
        columns = [("problems with", "{feature}"), ("number", "{problems:,}")]
        columns += [("failed", "{failed}")]
        columns += [
            (f"{name}, of its limit", f"{{{key}:.0%}}") for name, key in self.errors.items()
        ]
        return table("", columns, self.rows())


ROUNDS = 3  # of launches on several streams
HEAD_START = 20_000_000  # cycles in which the host hands these launches over

Results = tuple[torch.Tensor, ...]


class Trial(ABC):
    """A problem, its tensors, and the results of the first call.

    differs: message if `repeats` is false.
    findings: errors that the emulator's checker found in the first call, if it was asked.
    """

    differs: ClassVar[str] = "bits differ from run to run"

    def __init__(self, case: Any, place: Place, *, check: bool = False) -> None:
        self.case, self.place = case, place
        self.inputs = self.prepare()
        with emulation(Options(check=check, limit=None)) as emulated:
            self.first = self.call()
        self.findings = [str(error) for report in emulated.reports for error in report.errors]

    @property
    def is_native(self) -> bool:
        """Whether a GPU computes."""
        return self.place.backend == "cuda"

    @abstractmethod
    def prepare(self) -> Results:
        """The tensors that `step` takes, on the device."""

    @abstractmethod
    def step(self, *inputs: torch.Tensor) -> Results:
        """A call."""

    @abstractmethod
    def reports(self) -> Sequence[tolerance.Report]:
        """The first results beside the definition."""

    @abstractmethod
    def change(self) -> None:
        """Other contents of the same tensors."""

    def results(self, policy: str = POLICIES[0]) -> Results:
        """Return the results of a call. policy: of the emulator."""
        with emulation(Options(policy=policy, limit=None)):
            return self.call()

    def call(self) -> Results:
        """Return the results of a call, whose outputs hold NaN before."""
        with poisoned_outputs():
            return self.step(*self.inputs)

    def repeats(self) -> bool:
        """Whether another call gives the same bits, in the emulator under another schedule."""
        return same_bits(self.first, self.results(POLICIES[-1]))


def change_q_and_v(inputs: Results) -> None:
    """Other contents of the same tensors, of q, k and v."""
    q, _, v = inputs
    for tensor, factor in ((q, -1.0), (v, 0.5)):
        tensor.copy_(tensor.float() * factor)  # torch does not multiply in e4m3


def compiles(trial: Trial) -> bool:
    """Whether torch.compile gives the same bits."""
    torch._dynamo.reset()

    def step(*inputs: torch.Tensor) -> Results:
        return trial.step(*inputs)

    backend = "inductor" if trial.is_native else "aot_eager"
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    with poisoned_outputs():
        return same_bits(trial.first, compiled(*trial.inputs))


def replays(trial: Trial) -> bool:
    """Whether a CUDA graph gives the same bits, also with other contents of the same tensors: these
    and their results the trial has from here on."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = trial.results()
    graph.replay()
    same = same_bits(trial.first, results)
    trial.change()
    trial.first = trial.results()
    graph.replay()
    return same and same_bits(trial.first, results)


# Ways to run a trial once more, by flag; the last one changes its tensors.
WAYS: dict[str, tuple[Callable[[Trial], bool], str]] = {
    "compile": (compiles, "bits differ through torch.compile"),
    "graphs": (replays, "bits differ in a CUDA graph"),
}


def run_together(trials: Sequence[Trial]) -> list[bool]:
    """Return which trials give the same bits when run concurrently, each on a separate stream."""
    streams = [torch.cuda.Stream() for _ in trials]
    same, start = [True] * len(trials), torch.cuda.Event()
    for _ in range(ROUNDS):
        torch.cuda._sleep(HEAD_START)
        start.record()
        results = []
        for stream, trial in zip(streams, trials, strict=True):
            stream.wait_event(start)
            with torch.cuda.stream(stream):
                results.append(trial.results())
        torch.cuda.synchronize()
        for number, trial in enumerate(trials):
            same[number] &= same_bits(trial.first, results[number])
    return same


@dataclass(frozen=True)
class Family:
    """A family of problems.

    name: its name in `soak.py`.
    draws: makes the draws of a seed, an architecture and sizes.
    sizes: sizes by name.
    trial: makes the trial of a problem.
    features: features by which problems are counted.
    errors: reports of a trial whose shares of their limits are shown -> their labels."""

    name: str
    archs: Sequence[str]
    draws: Callable[[int, str, Any], Draws]
    sizes: Mapping[str, Any]
    trial: Callable[..., Trial]
    features: Mapping[str, Feature]
    errors: Mapping[str, str]


Compiled = tuple[Kernel, float, str]  # seconds; what was wrong, '' for nothing


def compiled(
    kernels: Sequence[Kernel],
    keys: Callable[[Kernel], Sequence[KernelKey]],
    jobs: int,
    seconds: float,
) -> Iterator[Compiled]:
    """Each kernel as soon as all of its keys are there, as far as they come within `seconds`.

    `keys` is called in a thread, for one kernel after the other, while the first ones compile: it
    may draw thousands of problems. ValueError where there is no cache through which processes could
    hand kernels over.
    """
    if store.from_environment() is None:
        raise ValueError(f"{store.VARIABLE} switches the cache off: --jobs 1 compiles without one")
    ends = time.monotonic() + seconds
    numbered = ((number, keys(kernel)) for number, kernel in enumerate(kernels))
    with multiprocessing.get_context("spawn").Pool(jobs, _leave_interrupts) as pool:
        results = pool.imap_unordered(_compile, numbered)
        for _ in kernels:
            try:
                left = max(ends - time.monotonic(), 0.0)
                number, *found = results.next(timeout=None if left == math.inf else left)
            except multiprocessing.TimeoutError:
                return
            yield kernels[number], *found


def _leave_interrupts() -> None:
    """Ignore interrupts, which the parent process handles."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _compile(numbered: tuple[int, Sequence[KernelKey]]) -> tuple[int, float, str]:
    number, keys = numbered
    began, wrong = time.monotonic(), ""
    try:
        for key in keys:
            ready(key)
    except Exception as error:  # noqa: BLE001 - of one kernel, whatever it is
        wrong = f"{type(error).__name__} while compiling: {error}"
    return number, time.monotonic() - began, wrong


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
        """Path of the file of failures."""
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
            trial = self.family.trial(case, self.place, check=self.options.check)
            wrong += trial.findings
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
        """Command that runs these problems again."""
        options = self.options
        words = [f"python scripts/soak.py {self.family.name}", f"--seed {options.seed}"]
        words += [f"--problem {' '.join(names)}"]
        words += [f"--{options.size}"] * bool(options.size)
        words += [f"--{way}" for way in (*WAYS, "streams") if getattr(options, way)]
        if self.place.backend == "emulate":
            words.append(f"--backend emulate --arch {self.place.arch}")
        words += ["--check"] * self.options.check
        return " ".join(words)


def perform(options: argparse.Namespace) -> int:
    """Run the campaign of a family: `FAMILY` of the module that the options name."""
    family: Family = import_module(f"lab.soak.{options.subject}").FAMILY
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
    """Run equally many problems of each kernel, as soon as it is compiled."""
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
        if soak.place.backend == "emulate":
            forget()  # no later problem needs the kernel, and 30 of them take 8 GB
            gc.collect()
        if soak.seconds_left <= 0:
            break
    if soak.seconds_left <= 0:
        print("--minutes are over", flush=True)


def _ready(
    soak: Soak, kernels: Sequence[Kernel], each: Sequence[int]
) -> Iterator[tuple[Kernel, float, str]]:
    """Compile in several processes; with one job or in the emulator, the first call compiles."""
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
    """Write the results so far to the file of --json."""
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
