"""Observe every launch in a stretch of Python, however it is started, and change its options.

All launches end in `Module.launch`: those of `load`, `run`, an intercepted script, and of libraries
that emulate by themselves. Watchers belong to the context: another thread takes part if it runs in
a copy of it (`contextvars.copy_context`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from ptxemu.findings import Finding
from ptxemu.options import Options
from ptxemu.report import LaunchReport, Report

# (entry of the launch, what was found or why it was stopped)
Hearer = Callable[[str, Finding | str], None]

_hearers: ContextVar[tuple[Hearer, ...]] = ContextVar("hearers", default=())
_suggested: ContextVar[dict[str, Any] | None] = ContextVar("suggested", default=None)
_active: ContextVar[tuple[tuple[dict[str, Any], Report], ...]] = ContextVar("watches", default=())


@contextmanager
def watched(**changes: Any) -> Iterator[Report]:
    """Within the block, apply `changes` to the options of launches (fields of `Options`).

    Each launch adds its report, even one that raised.
    """
    replace(Options(), **changes)  # refuses what no launch could take
    report = Report()
    outer = _active.set((*_active.get(), (changes, report)))
    try:
        yield report
    finally:
        _active.reset(outer)


@contextmanager
def suggested(**fields: Any) -> Iterator[None]:
    """Within the block, set these fields of `Options` for launches where they are None."""
    outer = _suggested.set(fields)
    try:
        yield
    finally:
        _suggested.reset(outer)


def adapted(options: Options) -> Options:
    """Return the options with all watchers' changes, the innermost last."""
    for changes, _ in _active.get():
        options = replace(options, **changes)
    fields = (_suggested.get() or {}).items()
    missing = {name: value for name, value in fields if getattr(options, name) is None}
    return replace(options, **missing) if missing else options


def note(launch: LaunchReport) -> None:
    """Add a launch to the report of each watcher."""
    for _, report in _active.get():
        report.launches.append(launch)
    for hear in _hearers.get() if launch.stopped else ():
        hear(launch.entry, launch.stopped)


@contextmanager
def heard(hear: Hearer) -> Iterator[None]:
    """Within the block, call `hear` for each finding as it arises, and for a fatal error.

    The process may end before the report.
    """
    outer = _hearers.set((*_hearers.get(), hear))
    try:
        yield
    finally:
        _hearers.reset(outer)


def heard_alone(hear: Hearer) -> None:
    """Send events only to `hear` from now on, in the form of `heard`."""
    _hearers.set((hear,))


def unchanged(finding: Finding) -> Finding:
    """Return the finding."""
    return finding


class Told(list[Finding]):
    """Findings of a launch; hearers get each as it is added, `named` as far as possible then."""

    def __init__(self, entry: str) -> None:
        super().__init__()
        self._entry = entry
        self.named: Callable[[Finding], Finding] = unchanged

    def append(self, finding: Finding) -> None:
        super().append(finding)
        for hear in _hearers.get():
            hear(self._entry, self.named(finding))
