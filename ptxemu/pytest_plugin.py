"""pytest plugin: run kernels of CuTe DSL in tests without a GPU, with schedules and the checker.

A test whose launches have errors fails with their report. pytest loads the plugin wherever ptxemu
is installed. Nothing heavy is imported until a test requests it, by the fixture `ptxemu` or by the
mark of that name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import pytest

import ptxemu
from ptxemu.errors import PtxEmuError
from ptxemu.options import POLICIES
from ptxemu.report import Report
from ptxemu.schedules import Schedule, policies, schedules, seeds

if TYPE_CHECKING:
    from ptxemu.report import LaunchReport

NAME = "ptxemu"  # of the fixture and the mark
_MARK = f"""\
{NAME}(policies=None, seeds=None, check=True, strict=False): run CuTe DSL launches of the test in \
the emulator, once for each schedule, and fail on errors of the checker. policies: of \
{", ".join(POLICIES)}; seeds: of those with chance; strict: notes, too."""
_OURS = Path(__file__).parent
_KNOWN = "ignore:Cache is disabled:UserWarning"  # the DSL's, where it keeps PTX


@dataclass(frozen=True)
class Wish:
    """Requests of mark and command line for a test; `schedules` is empty if none is named."""

    schedules: tuple[Schedule, ...] = ()
    check: bool = False
    strict: bool = False


class Emulation:
    """Value of the fixture: the names of package `ptxemu`, and the launches of the test.

    The names are `run`, `compile`, `load`, `Options`, the errors and all others.

    Attributes:
        report: All launches so far, however made, in order.
        schedule: Policy and seed of every launch; None if the launch decides.
    """

    def __init__(self, schedule: Schedule | None, report: Report) -> None:
        self.schedule = schedule
        self.report = report
        self._told = 0  # launches whose findings are in a report of pytest's

    def untold(self) -> Report:
        """Launches since this was asked for the last time."""
        launches = self.report.launches[self._told :]
        self._told = len(self.report.launches)
        return Report(launches)

    def __getattr__(self, name: str) -> Any:
        return getattr(ptxemu, name)

    def take(self) -> list[LaunchReport]:
        """The launches so far, which the report has no more: for a test that expects findings,
        which then do not fail it."""
        launches = [*self.report.launches]
        self.report.launches.clear()
        self._told = 0
        return launches


_EMULATION = pytest.StashKey[Emulation]()


# ---- options, marks, schedules


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup(NAME, "CuTe DSL kernels without a GPU (ptxemu)")
    where = f"tests with the fixture or the mark `{NAME}`"
    group.addoption("--ptxemu-check", action="store_true", help=f"check launches of {where}")
    group.addoption(
        "--ptxemu-strict",
        action="store_true",
        help="also note what only the manual's text requires",
    )
    group.addoption(
        "--ptxemu-policy",
        type=policies,
        metavar="NAME,...",
        help=f"run {where} with these schedules ({', '.join(POLICIES)}), not with the mark's",
    )
    group.addoption(
        "--ptxemu-seed", type=seeds, metavar="N,...", help="seeds of the random policies"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARK)


def _wish(item: pytest.Item) -> Wish:
    """Mark and options of a test; raises ValueError or TypeError for a mark that makes no sense."""
    mark, option = item.get_closest_marker(NAME), item.config.getoption
    asked = _asked(*mark.args, **mark.kwargs) if mark else Wish()
    names, numbers = option("--ptxemu-policy"), option("--ptxemu-seed")
    chosen = asked.schedules
    if names or numbers:
        names = names or dict.fromkeys(schedule.policy for schedule in chosen) or POLICIES[:1]
        numbers = numbers or dict.fromkeys(schedule.seed for schedule in chosen) or [0]
        chosen = tuple(schedules([*names], [*numbers]))
    strict = asked.strict or option("--ptxemu-strict")
    return Wish(chosen, asked.check or strict or option("--ptxemu-check"), strict)


def _asked(
    policies: Sequence[str] | str | None = None,
    seeds: Sequence[int] | int | None = None,
    check: bool = True,
    strict: bool = False,
) -> Wish:
    """The arguments of the mark."""
    names = [policies] if isinstance(policies, str) else [*(policies or POLICIES[:1])]
    numbers = [seeds] if isinstance(seeds, int) else [*([0] if seeds is None else seeds)]
    unknown = [name for name in names if name not in POLICIES]
    if unknown or not all(isinstance(number, int) for number in numbers) or not numbers:
        raise ValueError(
            f"policies={policies!r}, seeds={seeds!r}; must be of {', '.join(POLICIES)}, and ints"
        )
    named = policies is not None or seeds is not None
    return Wish(tuple(schedules(names, numbers)) if named else (), check or strict, strict)


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test for each schedule, such as test_gemm[adversarial-1]."""
    if NAME not in metafunc.fixturenames and not metafunc.definition.get_closest_marker(NAME):
        return
    try:
        wish = _wish(metafunc.definition)
    except (TypeError, ValueError) as error:
        wrong = str(error).replace("_asked()", "the mark")
        raise pytest.Collector.CollectError(f"@pytest.mark.{NAME}: {wrong}") from None
    if wish.schedules:
        if NAME not in metafunc.fixturenames:
            metafunc.fixturenames.append(NAME)
        metafunc.parametrize(NAME, wish.schedules, ids=map(str, wish.schedules), indirect=True)


def pytest_itemcollected(item: pytest.Item) -> None:
    """The fixture comes first, also where only the mark asks for it: what other fixtures make is
    on the same machine."""
    names = getattr(item, "fixturenames", None)
    if names is not None and (NAME in names or item.get_closest_marker(NAME)):
        names[:] = [NAME, *(name for name in names if name != NAME)]
        item.add_marker(pytest.mark.filterwarnings(_KNOWN))


# ---- the launches of a test


@pytest.fixture(name=NAME)
def _emulation(request: pytest.FixtureRequest) -> Iterator[Emulation]:
    """CuTe DSL launches of the test are emulated, on CPU and "cuda" tensors; as the package
    `ptxemu`, with `report`, the launches so far."""
    wish = _wish(request.node)
    schedule = getattr(request, "param", None)
    if schedule is None and wish.schedules:
        if len(wish.schedules) > 1:
            pytest.fail(f"a {type(request.node).__name__} runs under one schedule", pytrace=False)
        (schedule,) = wish.schedules
    with ExitStack() as stack:
        emulation = Emulation(schedule, stack.enter_context(_watched(schedule, wish)))
        stack.enter_context(_machine())
        request.node.stash[_EMULATION] = emulation
        yield emulation
    _fail_on_errors(emulation)  # of launches while other fixtures ended


def _watched(schedule: Schedule | None, wish: Wish) -> Any:
    """Change options only as mark and command line request."""
    from ptxemu.watch import watched

    changes: dict[str, Any] = schedule._asdict() if schedule else {}
    changes |= {"check": True} if wish.check else {}
    return watched(**changes, **({"strict": True} if wish.strict else {}))


def _machine() -> Any:
    from ptxemu.host.emulator import Emulator
    from ptxemu.host.gpu_machine import pretended_as_needed

    return pretended_as_needed(Emulator())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test that passes fails on errors of the checker; an error of the emulator ends at the line
    of the test that launched."""
    emulation = item.stash.get(_EMULATION, None)
    try:
        result = yield
    except PtxEmuError as error:
        if emulation is not None:
            raise error.with_traceback(_cut(error.__traceback__)) from None
        raise
    if emulation is not None:
        _fail_on_errors(emulation)
    return result


def _fail_on_errors(emulation: Emulation) -> None:
    launches = emulation.untold()
    if launches.errors:
        pytest.fail(_text(launches), pytrace=False)


def _text(report: Report) -> str:
    from ptxemu.check.text import render

    return render(report)


def _clues(report: Report) -> str:
    """Return unused data of checked launches, which shows a wrong index without a broken rule."""
    if not any(launch.partly or launch.unused for launch in report.launches):
        return ""
    from ptxemu.check.unused import clues

    return clues(report.launches)


def _cut(traceback: TracebackType | None) -> TracebackType | None:
    """Return the traceback down to the last frame outside ptxemu and the DSL above it."""
    frames = []
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    tests = [k for k, frame in enumerate(frames) if not _is_inner(frame)]
    kept = frames[: tests[-1] + 1] if tests else frames
    for frame, below in zip(kept, [*kept[1:], None], strict=True):
        frame.tb_next = below
    return kept[0] if kept else None


def _is_inner(frame: TracebackType) -> bool:
    """Whether it belongs to this package or to the DSL."""
    path = Path(frame.tb_frame.f_code.co_filename)
    return _OURS in path.parents or "nvidia_cutlass_dsl" in path.parts


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
    """Add findings, errors and unused data of the launches to a failure of any kind.

    A passing test has its notes, see `-rP`.
    """
    outcome: Any = yield
    emulation = item.stash.get(_EMULATION, None)
    ended = call.when == "call" or (call.when == "setup" and outcome.failed)
    if ended and emulation is not None:
        launches = _said_once(emulation.untold(), call.excinfo)
        told = any(launch.findings or launch.stopped for launch in launches.launches)
        texts = [_text(launches)] * told + [_clues(launches)] * outcome.failed
        if any(texts):
            outcome.sections.append((NAME, "\n\n".join(filter(None, texts))))
    return outcome


def _said_once(report: Report, failure: pytest.ExceptionInfo[BaseException] | None) -> Report:
    """Return the report without the text of the error that the test failed with, shown above."""
    said = str(failure.value) if failure and isinstance(failure.value, PtxEmuError) else ""
    if not said:
        return report
    first = said.partition("\n")[0]
    return Report(
        [
            replace(launch, stopped=launch.stopped.replace(said, f"{first} (see above)"))
            for launch in report.launches
        ]
    )
