"""Findings with one cause, put together: each warp, CTA, launch and schedule repeats them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ptxemu.findings import ERROR, MANUAL, Access, Finding, Launch

# Checks in the order in which their findings are read: what explains others comes first.
_ORDER = ("out-of-bounds", "race", "store-source", "uninitialised", "exited", "mbarrier", "barrier")


@dataclass
class Group:
    """`first` stands for all; `launches` are those that show it, in order, each once."""

    first: Finding
    findings: list[Finding] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)

    def add(self, finding: Finding, launch: Launch) -> None:
        self.findings.append(finding)
        if not any(launch is known for known in self.launches):
            self.launches.append(launch)

    def side(self, index: int) -> list[Access]:
        """The access at `index` of the first finding, and its like in each of the others."""
        place = self.first.accesses[index].place
        return [
            next(a for a in (f.accesses[index], *f.accesses) if a.place == place)
            for f in self.findings
        ]

    @property
    def ctas(self) -> int:
        """CTAs that an access names."""
        return len({access.cta for f in self.findings for access in f.accesses} - {""})

    @property
    def schedules(self) -> list[str]:
        """Such as "adversarial, seed 1", of the launches that show it."""
        return list(dict.fromkeys(map(schedule, self.launches)))


def grouped(launches: Iterable[Launch]) -> list[Group]:
    """The findings of launches, errors first, then by check, then as they came."""
    groups: dict[tuple[Any, ...], Group] = {}
    for launch in launches:
        for finding in launch.findings:
            key = (launch.entry, *_kind(finding, launch))
            groups.setdefault(key, Group(finding)).add(finding, launch)
    return sorted(groups.values(), key=lambda group: _rank(group.first))


def _kind(finding: Finding, launch: Launch) -> tuple[Any, ...]:
    """Equal for what is told together: what has one cause; without `strict` also what the manual
    alone asks for, however many lines lack it."""
    alone = finding.check == MANUAL and not finding.accesses
    return (MANUAL, finding.missing) if alone and not launch.options.strict else finding.place


def _rank(finding: Finding) -> tuple[bool, int, bool]:
    """What is read too early explains what is overwritten too early, rather than the reverse."""
    known = finding.check in _ORDER
    place = _ORDER.index(finding.check) if known else len(_ORDER)
    early = finding.accesses and finding.check == "race" and finding.accesses[0].what == "read"
    return finding.severity != ERROR, place, bool(early)


def schedule(launch: Launch) -> str:
    """Policy and, where there is chance in it, the seed."""
    options = launch.options
    seed = "" if options.policy == "round-robin" else f", seed {options.seed}"
    return options.policy + seed
