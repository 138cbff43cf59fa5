"""Every conformance case on the GPU and in ptxemu, and what came of it, form by form.

The GPU runs in processes of its own, several so that the driver compiles on several cores. A
program that hangs or is refused there (which spoils a CUDA context for good) costs one case and not
the rest.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import queue
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial

import numpy as np

import ptxemu
from lab.silicon.conformance import hw_runner
from lab.silicon.conformance.bounds import bounds_of, excess, ulps_apart
from lab.silicon.conformance.case import Case, Output
from lab.silicon.conformance.ptx_program import aimed_at
from ptxemu.options import FAST

_SECONDS = 60  # of one case on the GPU
_SHOWN = 3  # examples of a difference
_ERROR = re.compile(r"line (\d+); \w+\s*: (.*)")
_SPAWN = multiprocessing.get_context("spawn")

Outputs = dict[str, np.ndarray]


@dataclass
class Tally:
    """Results of all cases for a form."""

    inputs: int = 0
    same: int = 0
    bound: str = ""
    ulps: int = 0  # the most between the two results, where the form is an approximation
    errors: list[float] = field(default_factory=lambda: [0.0, 0.0])  # GPU's, ptxemu's, in bounds
    examples: list[str] = field(default_factory=list)
    differs: bool = False  # somewhere where every bit counts

    def add(self, other: Tally) -> None:
        """Add the results of another case for the form."""
        self.inputs += other.inputs
        self.same += other.same
        self.bound = self.bound or other.bound
        self.ulps = max(self.ulps, other.ulps)
        self.errors = [max(pair) for pair in zip(self.errors, other.errors, strict=True)]
        self.examples += other.examples
        self.differs |= other.differs

    @property
    def right(self) -> bool:
        """Whether the bits are equal, or both results are within the bound."""
        return not self.differs and max(self.errors) <= 1


@dataclass
class Campaign:
    """Tallies by form, digests of the GPU's outputs by case, and what could not be run."""

    forms: dict[str, Tally] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    programs: int = 0
    sums: dict[str, str] = field(default_factory=dict)  # digests of cases of which `sums` holds

    def absorb(self, other: Campaign) -> None:
        """Add the results of another campaign."""
        for form, tally in other.forms.items():
            self.forms.setdefault(form, Tally()).add(tally)
        self.digests |= other.digests
        self.failures |= other.failures
        self.programs += other.programs
        self.sums |= other.sums

    def judge(self, case: Case, gpu: Outputs, emulated: Outputs) -> None:
        sources = [b.data for b in case.program.buffers() if b.expected is None]
        self.programs += 1
        if case.sums:
            self.sums[case.name] = case.digest_of_sums(gpu)
        if case.recorded:
            self.digests[case.name] = case.digest(gpu)
        for name, output in case.outputs.items():
            a, b = _bits(gpu[name]), _bits(emulated[name])
            for (forms, x), (_, y) in zip(output.parts(a), output.parts(b), strict=True):
                for form in forms:
                    self._tally(form, output, sources, (x, y))

    def _tally(self, form: str, output: Output, sources: list[np.ndarray], found: tuple) -> None:
        same = found[0] == found[1]
        tally = self.forms.setdefault(form, Tally())
        tally.inputs += output.inputs
        tally.same += int(same.sum()) * output.inputs // max(same.size, 1)
        if output.approximate:
            _compare_approximation(tally, form, sources, found)
        elif not same.all():
            tally.differs = True
            tally.examples += _examples(output.label, sources, *found)


def _bits(found: np.ndarray) -> np.ndarray:
    return found.view(f"u{found.itemsize}")


def _compare_approximation(
    tally: Tally, form: str, sources: list[np.ndarray], found: tuple[np.ndarray, np.ndarray]
) -> None:
    bounds = bounds_of(form)
    tally.bound = ", ".join(map(str, bounds))
    promised = np.zeros(ulps_apart(form, *found).shape, bool)
    for bound in bounds:
        for k in (0, 1):
            error = excess(form, bound, sources, found[k])
            promised |= error >= 0
            tally.errors[k] = max(tally.errors[k], float(error.max()))
            if error.max() > 1:
                worst = int(error.argmax())
                who = ("GPU", "ptxemu")[k]
                tally.examples.append(f"{who}: element {worst} is {error[worst]:.3g} bounds off")
    tally.ulps = max(tally.ulps, int(np.where(promised, ulps_apart(form, *found), 0).max()))


def _examples(label: str, sources: list[np.ndarray], a: np.ndarray, b: np.ndarray) -> list[str]:
    """The first elements that differ: operands, the GPU's result, ptxemu's."""
    wrong = np.flatnonzero(a != b)
    out = [f"{label}: {len(wrong)} of {len(a)} elements differ"]
    for k in wrong[:_SHOWN].tolist():
        shown = [hex(int(x[k])) for x in sources if x.size == a.size and x.dtype.kind == "u"]
        out.append(f"[{k}] {' '.join(shown)}: GPU {int(a[k]):#x}, ptxemu {int(b[k]):#x}")
    return [" ".join(out)]


# -- the GPU, in its own process -------------------------------------------------------------


class Device:
    """A worker process, replaced after a failure that it did not survive. A GPU's process is
    replaced after every failure, which may have corrupted its context."""

    def __init__(self, *, gpu: bool = True) -> None:
        self._pool, self._fragile = self._fresh(), gpu

    @staticmethod
    def _fresh() -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, mp_context=_SPAWN)

    def ask(self, function: object, *arguments: object) -> object:
        """function(*arguments) there; raises what it raises."""
        try:
            return self._pool.submit(function, *arguments).result(timeout=_SECONDS)
        except Exception as error:
            if self._fragile or isinstance(error, (Late, BrokenProcessPool)):
                self._end()
                self._pool = self._fresh()
            raise

    def _end(self) -> None:
        for process in list((self._pool._processes or {}).values()):
            process.kill()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        self._pool.shutdown()


def refusals(
    ask: Callable[[str], str], lines: Sequence, question: Callable[[Sequence], tuple[str, int]]
) -> dict[int, str]:
    """Index of a line -> why the compiler does not take it.

    question(lines): a module with one of them per text line, and the number of the first. A line
    that is no PTX at all stops the compiler, so the others are asked again without it.
    """
    left, out = list(range(len(lines))), {}
    while True:
        text, first = question([lines[k] for k in left])
        said = ask(text)
        found = {
            left[int(number) - first]: reason.strip()
            for number, reason in reversed(_ERROR.findall(said))
        }
        if said and not found:
            raise RuntimeError(f"the compiler's answer is not understood: {said[:500]}")
        out |= found
        left = [k for k in left if k not in found]
        if not found:
            return out


def _emulate(case: Case, accumulation: str, target: str) -> Outputs:
    """target: of the GPU that it is compared with, which sums as its generation does. Only
    programs of any numbers are summed otherwise; in the others every sum is exact."""
    if accumulation == FAST or not case.sums:
        return case.emulated()
    aimed = dataclasses.replace(case, program=aimed_at(case.program, target))
    return aimed.emulated(ptxemu.Options(limit=None, accumulation=accumulation))


def emulated(
    cases: Sequence[Case], jobs: int, how: tuple[str, str]
) -> Iterator[tuple[Case, Outputs]]:
    """The cases with what ptxemu makes of them, several at a time. how: accumulation, target."""
    work = partial(_emulate, accumulation=how[0], target=how[1])
    with ProcessPoolExecutor(jobs, mp_context=_SPAWN) as pool:
        yield from zip(cases, pool.map(work, cases, chunksize=4), strict=True)


@dataclass
class Answer:
    """A case that was asked about: what it says alone, and what both left in memory."""

    case: Case
    said: Campaign
    gpu: Outputs = field(default_factory=dict)


def campaign(
    devices: Sequence[Device], cases: Sequence[Case], jobs: int, how: tuple[str, str]
) -> Iterator[Answer]:
    """The cases on the GPU and in ptxemu, in their order; a failure of either is in `said`. how:
    accumulation and target of the emulation."""
    free: queue.SimpleQueue[Device] = queue.SimpleQueue()
    for device in devices:
        free.put(device)

    def ask(case: Case) -> Outputs:
        device = free.get()
        try:
            return device.ask(hw_runner.launch, case.program)
        finally:
            free.put(device)

    with (
        ThreadPoolExecutor(len(devices)) as threads,
        ProcessPoolExecutor(jobs, mp_context=_SPAWN) as pool,
    ):
        started = [
            (case, threads.submit(ask, case), pool.submit(_emulate, case, *how)) for case in cases
        ]
        try:
            for case, asked, emulation in started:
                answer = Answer(case, Campaign())
                try:
                    answer.gpu = asked.result()
                    answer.said.judge(case, answer.gpu, emulation.result())
                except Exception as caught:  # noqa: BLE001  any failure is a result
                    said = f"{type(caught).__name__}: {caught}"
                    answer.said.failures[case.name] = said
                yield answer
        finally:  # whoever stops early wants no more of them
            for _, asked, emulation in started:
                asked.cancel()
                emulation.cancel()
