"""What a campaign has done: problems by feature, the worst errors, failures."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kernelkit.numerics import tolerance
from lab.measure.accuracy import share
from lab.tools.tables import Table, table

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
    """command: repeats it; problems: their names; case: the first of them; wrong: what was."""

    problems: list[str]
    command: str
    case: str
    wrong: list[str]

    def __str__(self) -> str:
        return "\n    ".join([f"FAILED {self.command}", self.case, *self.wrong])


@dataclass
class Record:
    """features: of which problems are counted. errors: names of reports, and what they are called
    where shares are written down."""

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
        """Of the features that occurred."""
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
