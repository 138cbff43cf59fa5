"""Mutants of whatever a script launches: the script is run again for each, with other PTX."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from ptxemu.findings import Finding
from ptxemu.module import Launch, Module, launching
from ptxemu.mutation.carried import Carried, witnessed
from ptxemu.mutation.observe import observe
from ptxemu.mutation.text import Observed, changed, spread
from ptxemu.report import LaunchReport, Report
from ptxemu.watch import watched

# Ways to notice a mutant; the last is the script's check, such as of wrong numbers.
CHECKER, DEADLOCK, REFUSED, SCRIPT, CRASH = NOTICED = (
    *("checker", "deadlock", "refused", "script", "crash"),
)
UNNOTICED, BROKEN = "", "broken"  # broken: the mutant is no PTX, or was not launched
_HANGS = ("Deadlock", "LimitExceeded")
_NO_PTX = ("PtxSyntaxError", "UnsupportedPtx")
_REFUSALS = ("HardwareRefusal", "OutOfBounds")  # perhaps before the launch has begun

Changes = Mapping[str, Any]  # fields of `Options`
Run = Callable[[], str]  # runs the script; how it failed, or ''


@dataclass
class Kernel:
    """PTX that the script launches, an instruction a line, and what a run shows of it."""

    ptx: str
    entry: str
    observed: Observed


@dataclass
class Baseline:
    """The script without mutations.

    Attributes:
        kernels: Kernels by digest.
        known: Places of the checker's findings in it, which do not reveal a mutant.
    """

    kernels: dict[str, Kernel] = field(default_factory=dict)
    known: set[tuple[Any, ...]] = field(default_factory=set)
    failure: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """Verdict on a mutant.

    Attributes:
        by: One of NOTICED, UNNOTICED or BROKEN.
        how: Message of what noticed it.
    """

    by: str
    how: str = ""
    schedule: str = ""
    seconds: float = 0.0

    @property
    def noticed(self) -> bool:
        return self.by in NOTICED


@lru_cache(maxsize=256)
def digest(ptx: str) -> str:
    """Return the digest of a module, whatever its kernels' names; the DSL numbers them."""
    for number, name in enumerate(re.findall(r"\.entry\s+([\w$%]+)", ptx)):
        ptx = ptx.replace(name, f"kernel{number}")
    return hashlib.sha256(ptx.encode()).hexdigest()[:16]


def baseline(run: Run, schedules: Sequence[Changes]) -> Baseline:
    """Run the unchanged script under each schedule; its failures would hide those of mutants."""
    found = Baseline()
    began = time.perf_counter()
    for number, changes in enumerate(schedules):
        with watched(**changes) as report, _seen(found, observing=number == 0):
            found.failure = found.failure or run()
        found.known |= {finding.place for finding in report.findings}
        found.failure = found.failure or _stop(report)
    found.seconds = (time.perf_counter() - began) / max(len(schedules), 1)
    return found


def verdict(
    run: Run,
    kernel: str,
    lines: Mapping[int, str],
    schedules: Mapping[str, Changes],
    known: set[tuple[Any, ...]],
) -> Verdict:
    """Run the script with a mutated kernel under each schedule until one notices it.

    Args:
        kernel: Digest of the kernel.
        lines: New text of some of its lines.
        schedules: Options by name.
        known: See `Baseline.known`.
    """
    began = time.perf_counter()
    found = Verdict(UNNOTICED)
    for name, changes in schedules.items():
        with watched(**changes) as report, _mutated(kernel, lines) as launched:
            failure = run()
        found = _judged(report, failure, known) if launched else Verdict(BROKEN, "not launched")
        found = Verdict(found.by, found.how, name, round(time.perf_counter() - began, 2))
        if found.by != UNNOTICED:
            break
    return found


def findings(run: Run, kernel: str, lines: Mapping[int, str], **changes: Any) -> list[Finding]:
    """Run the script with other text on `lines` of the kernel of that digest, and return what the
    checker finds, notes included. changes: fields of `Options`."""
    with watched(check=True, **changes) as report, _mutated(kernel, lines) as launched:
        run()
    if not launched:
        raise ValueError(f"the kernel {kernel} was not launched: give the digest of one that is")
    return report.findings


def carried(run: Run, kernel: str, lines: Mapping[int, str]) -> Carried:
    """Return what orders a kernel's accesses, from a run of the script under the checker.

    Args:
        kernel: Digest of the kernel.
        lines: New text of some of its lines.
    """
    with watched(check=True), _mutated(kernel, lines, witnessed) as launched:
        run()
    found = Carried(abroad=not launched)
    for each in launched:
        found.abroad |= each.abroad
        for pair, told in each.pairs.items():
            found.pairs[pair] |= told
    return found


def _judged(report: Report, failure: str, known: set[tuple[Any, ...]]) -> Verdict:
    found = [f for launch in report.launches for f in _counted(launch) if f.place not in known]
    if found:
        return Verdict(CHECKER, f"{found[0].check}: {found[0].message}")
    stopped = _stop(report)
    stop = stopped or failure
    kind = stop.partition(":")[0]
    if kind in _HANGS:
        return Verdict(DEADLOCK, _line(stop))
    if kind in _NO_PTX:
        return Verdict(BROKEN, _line(stop))
    if stop:
        return Verdict(REFUSED if stopped or kind in _REFUSALS else SCRIPT, _line(stop))
    return Verdict(UNNOTICED)


def _counted(launch: LaunchReport) -> list[Any]:
    return launch.findings if launch.options.strict else launch.errors


def _stop(report: Report) -> str:
    return next((launch.stopped for launch in report.launches if launch.stopped), "")


def _line(text: str) -> str:
    return text.partition("\n")[0]


@contextmanager
def _seen(found: Baseline, *, observing: bool) -> Iterator[None]:
    """Within the block the kernels of all launches are taken down."""

    def through(launch: Launch, module: Module) -> Launch:
        def run(entry: str | None = None, **kwargs: Any) -> LaunchReport:
            reports: list[LaunchReport] = []
            key = digest(module.text)
            spread_module = _other(module, spread(module.text))
            if not observing and key in found.kernels:
                return launch(spread_module, entry, **kwargs)
            shown = observe(lambda _: reports.append(launch(spread_module, entry, **kwargs)))
            old = found.kernels.get(key)
            if old is not None:  # what one launch contradicts does not hold
                shown = Observed(
                    old.observed.unheard & shown.unheard,
                    old.observed.last & shown.last,
                    old.observed.implied & shown.implied,
                    (old.observed.executed or frozenset()) | (shown.executed or frozenset()),
                )
            found.kernels[key] = Kernel(spread_module.text, module.entry(entry).name, shown)
            return reports[0]

        return run

    with launching(through):
        yield


@contextmanager
def _mutated(
    kernel: str,
    lines: Mapping[int, str],
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[list[Any]]:
    """Within the block the kernel of that digest has other lines; gives what `around` has given of
    each of its launches."""
    launched: list[Any] = []

    def through(launch: Launch, module: Module) -> Launch:
        if digest(module.text) != kernel:
            return lambda *args, **kwargs: launch(module, *args, **kwargs)

        def run(entry: str | None = None, **kwargs: Any) -> LaunchReport:
            text = changed(spread(module.text), lines)
            with around() as given:
                launched.append(given)
                return launch(_other(module, text), entry, **kwargs)

        return run

    with launching(through):
        yield launched


def _other(module: Module, text: str) -> Module:
    """Return the module with that text, which may be its current text."""
    return module if text == module.text else _module(text)


_module = lru_cache(maxsize=4)(Module)
