"""Report of a launch, with its recording and its inspection."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ptxemu.findings import Launch, Launches

if TYPE_CHECKING:  # numpy comes with them, and `--help` does without
    from ptxemu.inspect.inspection import Inspection
    from ptxemu.record.recording import Recording


@dataclass
class LaunchReport(Launch):
    """Report of a kernel launch: counts, findings, trace, and what options asked to keep."""

    recording: Recording | None = None  # of `Options.record`
    inspection: Inspection | None = None  # what `Options.inspect` asked to see

    @classmethod
    def of(cls, launch: Launch, **more: Any) -> LaunchReport:
        """A launch with more that is known of it; counts and findings are shared."""
        known = {field.name: getattr(launch, field.name) for field in fields(launch)}
        return cls(**known | more)


@dataclass
class Report(Launches[LaunchReport]):
    """All launches of one host call, in order."""
