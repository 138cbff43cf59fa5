"""Sees every launch of a stretch of Python, however it is started, and may change its options.

All launches end in `Module.launch`: those of `load`, `run`, an intercepted script, and of libraries
that emulate by themselves. Who watches is a matter of the context: another thread takes part where
it runs in a copy of it (`contextvars.copy_context`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from ptxemu.options import Options
from ptxemu.report import LaunchReport, Report

_active: ContextVar[tuple[tuple[dict[str, Any], Report], ...]] = ContextVar("watches", default=())


@contextmanager
def watched(**changes: Any) -> Iterator[Report]:
    """Within the block launches take `changes` to their options (fields of
    `Options`); each leaves its report, the one that raised as well."""
    replace(Options(), **changes)  # refuses what no launch could take
    report = Report()
    outer = _active.set((*_active.get(), (changes, report)))
    try:
        yield report
    finally:
        _active.reset(outer)


def adapted(options: Options) -> Options:
    """The options as those who watch want them, the innermost last."""
    for changes, _ in _active.get():
        options = replace(options, **changes)
    return options


def note(launch: LaunchReport) -> None:
    """Add a launch to the report of each who watches."""
    for _, report in _active.get():
        report.launches.append(launch)
