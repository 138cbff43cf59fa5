"""Sees every launch of a stretch of Python, however it is started, and may change its options.

All launches end in `Module.launch`: those of `load`, `run`, an intercepted script, and of libraries
that emulate by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ptxemu.options import Options
from ptxemu.report import LaunchReport, Report

_active: list[tuple[dict[str, Any], Report]] = []


@contextmanager
def watched(**changes: Any) -> Iterator[Report]:
    """Within the block launches of all threads take `changes` to their options (fields of
    `Options`); each leaves its report, the one that raised as well.
    """
    replace(Options(), **changes)  # refuses what no launch could take
    watch = (changes, Report())
    _active.append(watch)
    try:
        yield watch[1]
    finally:
        _active.remove(watch)


def adapted(options: Options) -> Options:
    """The options as those who watch want them, the innermost last."""
    for changes, _ in _active:
        options = replace(options, **changes)
    return options


def note(launch: LaunchReport) -> None:
    """Add a launch to the report of each who watches."""
    for _, report in _active:
        report.launches.append(launch)
