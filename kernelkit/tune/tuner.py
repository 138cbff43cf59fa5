"""Measure which options suit a shape on the present GPU, and keep the answer.

`tune` times the candidates of a choose step, which the family lists for a problem. It drops those
that do not fit or have other results, and lets the others race (`kernelkit.tune.halving`). It keeps
the fastest if that beats the rules' choice by more than the noise of both. Candidates are applied
the same way as kept choices: `kernelkit.tune.choices.forcing` answers the choose step.
"""

from __future__ import annotations

import dataclasses
import json
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing import get_context
from typing import Any

import torch

from kernelkit.call.front import forget
from kernelkit.call.operator import Operator
from kernelkit.compile import store
from kernelkit.compile.compiler import collecting
from kernelkit.compile.keys import KernelKey, NotPlain
from kernelkit.compile.warm import ready
from kernelkit.tune import files as tuned_files
from kernelkit.tune.choices import REFUSALS, Choice, Tuned, described, forcing
from kernelkit.tune.files import Entry, Machine
from kernelkit.tune.halving import Sampler, Time, race

# What is tuned -> the module whose `SUBJECT` says how, or another name.
SUBJECTS = {
    "attention": "fmha.tuning",
    "decode": "gqa_lowlatency.tuning",
    "grouped_gemm": "moe.tuning:GROUPED",
    "mixed_gemm": "moe.tuning:MIXED",
    "mla": "mla.attention.tuning",
    "q8_0.matvec": "q8_0.tuning:MATVECS",
    "q8_0.product": "q8_0.tuning:PRODUCTS",
}
# Names of packages and scripts -> the SUBJECTS that they mean.
ALSO = {
    **dict.fromkeys(("fmha",), ("attention",)),
    **dict.fromkeys(("gqa", "gqa_lowlatency"), ("decode",)),
    **dict.fromkeys(("moe", "experts"), ("grouped_gemm", "mixed_gemm")),
    "q8_0": ("q8_0.matvec", "q8_0.product"),
}
KEPT_CANDIDATES = 20  # of an entry, the fastest
Call = tuple[Operator, Mapping[str, Any]]
Bench = Callable[[Choice], Sampler]  # raises where the options cannot run, or give other results
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Subject:
    """Subject of tuning.

    tuned: measurements that its choose step reads
    shape: a frozen dataclass of plain values with defaults, by which a user describes a call
    call: makes a call of a shape on a device, for an architecture, which is None except on 'meta'
    choices: candidates of a problem on an architecture, in the choose step's form; not all need fit
    draw: draws a random shape
    known: shapes of models and of this repository's tables, whose measurements the package includes
    """

    tuned: Tuned
    shape: type
    call: Callable[[Any, torch.device, str | None], Call]
    choices: Callable[[Any, str], Sequence[Choice]]
    draw: Callable[[random.Random], Any]
    known: Sequence[Any] = ()


@dataclass(frozen=True)
class Outcome:
    """Result for a shape.

    times: pairs of options and their time, the fastest first; {} is the rules' choice
    refused: pairs of options and why they were not timed
    kept: whether the fastest beat the rules and is kept, or would be
    """

    operator: str
    shape: dict[str, Any]
    problem: dict[str, Any]
    times: list[tuple[Choice, Time]]
    refused: list[tuple[Choice, str]]
    kept: bool
    best: Choice = field(default_factory=dict)

    def time_of(self, choice: Choice) -> Time:
        """Return the time of timed options."""
        return next(time for options, time in self.times if options == choice)

    @property
    def rules_us(self) -> float:
        """Microseconds of what the rules choose."""
        return self.time_of({}).us

    @property
    def us(self) -> float:
        """Microseconds of what is chosen from now on."""
        return self.time_of(self.best).us

    @property
    def excess(self) -> float:
        """Relative slowdown against the fastest of all; meaningful only if no candidate left early
        (`exhaustive`)."""
        return self.us / min(time.us for _, time in self.times) - 1

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self) | {
            "rules_us": self.rules_us, "us": self.us, "excess": self.excess,
        }  # fmt: skip


def operator_of(name: str) -> str:
    """Return the name in SUBJECTS that a name of a subject, a package or a script means.

    Raises ValueError for an unknown name, and for one that means several subjects.
    """
    if len(meant := ALSO.get(name, (name,))) > 1:
        raise ValueError(f"{name!r} has several operators: name one, {' or '.join(meant)}")
    if meant[0] not in SUBJECTS:
        raise ValueError(f"{name!r}: what can be tuned is {', '.join(SUBJECTS)}")
    return meant[0]


def subject(name: str) -> Subject:
    """Return the subject of a name that `operator_of` accepts. Raises ValueError for others."""
    module, _, attribute = SUBJECTS[operator_of(name)].partition(":")
    return getattr(import_module(module), attribute or "SUBJECT")


def tune(
    name: str,
    shapes: Iterable[Any],
    *,
    device: torch.device | str | None = None,
    exhaustive: bool = False,
    keep: bool = True,
    workers: int = 1,
    progress: Progress | None = None,
    machine: Machine | None = None,
    bench_of: Callable[[Subject, Any, torch.device], Bench] | None = None,
) -> list[Outcome]:
    """Find the fastest options for shapes, and keep them for later processes.

    Calls of this process use them, too, unless it has made such a call already.

    Args:
        name: one of SUBJECTS, or another name that `operator_of` accepts.
        shapes: of the subject's type (`subject(name).shape`).
        device: a CUDA GPU that nobody else should use meanwhile; the current one by default.
        exhaustive: sample every candidate to the end, not only the faster ones. The result that is
            kept is the one of a race without this option.
        keep: whether results are kept in the user's cache folder.
        workers: processes that compile; they import the main module as `multiprocessing` does.
        progress: called with a line of text at each step.
        machine, bench_of: for tests: the GPU's description, and the maker of a shape's samplers.

    Raises:
        ValueError: for another name, a device that is no GPU, or a cache that is switched off.
        NotImplementedError: for a GPU that the operator is not written for.
        OSError: if the file cannot be written.
    """
    name, say = operator_of(name), progress or (lambda _: None)
    about = subject(name)
    where = torch.device("cuda" if device is None else device)
    if bench_of is None:
        where = _gpu(where)
    machine = machine or tuned_files.machine_of(where)
    place = tuned_files.place_of(about.tuned, machine)
    folder = tuned_files.folder_of_user()
    if keep and folder is None:
        raise ValueError(f"{store.VARIABLE} is off: there is no folder to keep results in")
    found = []
    with Compilers(workers, say) as compilers:
        for shape in shapes:
            say(f"{name} {_words(shape)}")
            about_shape = _Shape(about, shape, where, machine.arch)
            bench = (bench_of or _bench)(about, shape, where)
            outcome = about_shape.outcome(bench, compilers, exhaustive, say)
            found.append(outcome)
            if keep and outcome.kept and folder is not None:
                tuned_files.add(folder, place, [entry_of(outcome)])
            say(f"  {outcome.us:.2f} us with {dict(outcome.best) or 'what the rules choose'}, "
                f"{outcome.rules_us:.2f} by the rules")  # fmt: skip
    about.tuned.forget()
    return found


def entry_of(outcome: Outcome) -> Entry:
    """Return the entry to keep of an outcome."""
    times = [(dict(choice), time.us) for choice, time in outcome.times[:KEPT_CANDIDATES]]
    best = dict(outcome.best)
    return Entry(
        outcome.problem, best, outcome.us, outcome.rules_us, tuple(times), when=time.time()
    )


def _gpu(device: torch.device) -> torch.device:
    """Return the device with its index. ValueError if there is no such GPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        raise ValueError(
            f"device {device}: tuning needs a CUDA GPU to measure times; the emulator has none"
        )
    return torch.device(
        "cuda", torch.cuda.current_device() if device.index is None else device.index
    )


def _bench(about: Subject, shape: Any, device: torch.device) -> Bench:
    from kernelkit.tune.stopwatch import Bench as OnGpu

    return OnGpu(about.tuned.name, lambda where: about.call(shape, where, None), device)


class _Shape:
    """A shape of a subject on a device."""

    def __init__(self, about: Subject, shape: Any, device: torch.device, arch: str) -> None:
        self.about, self.shape, self.arch = about, shape, arch
        named = arch if device.type == "meta" else None
        self._operator, self._given = about.call(shape, device, named)
        self.problem = self._asked({})[1]

    def outcome(
        self, bench: Bench, compilers: Compilers, exhaustive: bool, say: Progress
    ) -> Outcome:
        fitting, refused, keys = self._fitting()
        say(f"  {len(fitting)} candidates, {len(keys)} kernels")
        compilers.bring(keys)
        samplers: dict[int, Sampler] = {}
        for number, choice in enumerate(fitting):
            try:
                samplers[number] = bench(choice)
            except Exception as error:
                if not choice:
                    raise
                refused.append((choice, f"{type(error).__name__}: {error}"))
        times = race(samplers, [0])
        best = min(times, key=lambda number: (times[number].samples < times[0].samples,
                                              times[number].us))  # fmt: skip
        kept = times[best].beats(times[0])
        if exhaustive:
            times = race(samplers, [0], exhaustive=True)
        forget()  # calls with what was chosen until now
        ranked = sorted(times.items(), key=lambda item: item[1].us)
        return Outcome(
            self.about.tuned.name,
            described(self.shape),
            described(self.problem),
            [(fitting[number], taken) for number, taken in ranked],
            refused,
            kept,
            fitting[best] if kept else {},
        )

    def _fitting(self) -> tuple[list[Choice], list[tuple[Choice, str]], list[KernelKey]]:
        """(candidates that the choose step takes, {} first; those that it refuses; kernels)."""
        fitting: list[Choice] = []
        refused: list[tuple[Choice, str]] = []
        kernels: dict[KernelKey, None] = {}
        for choice in ({}, *self.about.choices(self.problem, self.arch)):
            try:
                keys, _ = self._asked(choice)
            except REFUSALS as error:
                if not choice:
                    raise
                refused.append((choice, str(error)))
                continue
            fitting.append(choice)
            kernels |= dict.fromkeys(keys)
        return fitting, refused, [*kernels]

    def _asked(self, choice: Choice) -> tuple[list[KernelKey], Any]:
        """The kernels of the call with these options, and its problem. Nothing is compiled.
        ValueError where the call leaves nothing to choose."""
        with collecting() as keys, forcing(self.about.tuned.name, choice) as forced:
            self._operator.run(self._operator.schema.flat(self._given))
        if not forced.problems:
            raise ValueError(f"{_words(self.shape)}: nothing is left to choose")
        return keys, forced.problems[0]


# ---- compiling


class Compilers:
    """Processes that bring kernels into the cache on disk. Where there is one, or no cache, they do
    nothing: each kernel is compiled when it is first launched."""

    def __init__(self, workers: int, say: Progress) -> None:
        at_once = workers > 1 and store.from_environment() is not None
        # They start with the first kernels, and each of them imports the DSL once.
        self._pool = ProcessPoolExecutor(workers, get_context("spawn")) if at_once else None
        self._say = say

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def bring(self, keys: Sequence[KernelKey]) -> None:
        """Back when they are there. One that cannot be compiled says why when it is launched."""
        if self._pool is None or len(keys) < 2:
            return
        try:
            texts = [key.to_text() for key in keys]
        except NotPlain:
            return
        try:
            waiting = [self._pool.submit(_compile, text) for text in texts]
        except BrokenProcessPool:
            self._say("  a compiler was killed: kernels are compiled when they are first launched")
            return
        for number, _ in enumerate(as_completed(waiting), 1):
            if number % 10 == 0 or number == len(waiting):
                self._say(f"  {number} of {len(waiting)} kernels compiled")


def _compile(text: str) -> None:
    ready(KernelKey.from_text(text))


def _words(shape: Any) -> str:
    return json.dumps(described(shape)).strip("{}").replace('"', "") or "as by default"
