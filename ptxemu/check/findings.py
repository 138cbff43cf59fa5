"""Findings of a checker, each reported once however many CTAs, warps and iterations show it.

For two accesses in conflict, the finding names both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ptxemu.check.clocks import Component, Stamp
from ptxemu.findings import Access, Finding, place_of
from ptxemu.syntax.tree import Instr


class Findings:
    """Findings of one launch.

    sites: its instructions, indexed by `Warp.at`.
    """

    def __init__(self, sites: list[Instr], found: list[Finding]) -> None:
        self.sites = sites
        self._found = found
        self._known: set[tuple[object, ...]] = set()

    def new(self, *key: object) -> bool:
        """Whether this is the first time."""
        if key in self._known:
            return False
        self._known.add(key)
        return True

    def report(self, finding: Finding) -> None:
        """Add a finding, unless an equal one was added."""
        if finding not in self._found:
            self._found.append(finding)

    def at(self, check: str, message: str, site: int, **more: Any) -> None:
        """Report an instruction; findings at site 0, which is none, are distinguished by
        message."""
        if self.new(check, site, message if not site else ""):
            self.report(Finding(check, message, **place_of(self.sites[site]), **more))


@dataclass(frozen=True)
class Side:
    """Access on one side of a conflict.

    Attributes:
        first: First byte, or first column of tensor memory.
        last: Last byte or column, inclusive.
        known: Components to which its stamp refers.
    """

    space: str
    first: int
    last: int
    known: list[Component]
    stamp: Stamp
    wrote: bool
    known_as: str = ""

    @property
    def component(self) -> Component:
        return self.known[self.stamp.component]


class Conflicts:
    """Reports each pair of instructions once, however many cells and CTAs show it."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._sites = findings.sites

    def report(self, before: Side, now: Side, missing: tuple[str, str], why: str = "") -> None:
        """Report a race. missing: the missing instruction, and the section of the manual."""
        key = (before.space.split()[0], before.stamp.site, now.stamp.site, now.wrote)
        if not self._findings.new("race", *key):
            return
        instr = self._sites[now.stamp.site]
        earlier, later = self.access(before), self.access(now)
        finding = Finding(
            "race",
            f"{later.role} is not ordered after {earlier.role}",
            **place_of(instr),
            accesses=(earlier, later),
            missing=missing[0],
            rule=missing[1],
            why=why,
        )
        self._findings.report(finding)

    def with_launch_before(self, address: int, now: Stamp, wrote: bool) -> None:
        """A dependent launch touches what the launch before it has touched."""
        if not self._findings.new("the launch before", now.site):
            return
        instr = self._sites[now.site]
        what = "write" if wrote else "read"
        finding = Finding(
            "race",
            f"{short(instr.opcode)} of a dependent launch is not ordered after the one before",
            **place_of(instr),
            accesses=(
                Access("the launch before", "", "access", "global memory", address, address),
                Access("this launch", short(instr.opcode), what, "global memory", address, address,
                       **place_of(instr)),
            ),
            missing="griddepcontrol.wait before it",
            rule="griddepcontrol",
        )  # fmt: skip
        self._findings.report(finding)

    def access(self, side: Side) -> Access:
        """Return the access as it appears in a finding."""
        instr, component = self._sites[side.stamp.site], side.component
        agent = component.agent
        if component.kind not in ("warp", "mbarrier"):
            agent = f"{component.kind} of {agent}"
        return Access(
            agent=agent,
            role=short(instr.opcode),
            what="write" if side.wrote else "read",
            space=side.space,
            first=side.first,
            last=side.last,
            **place_of(instr),
            known_as=side.known_as,
        )


_WORDS = {"cp": 4, "tcgen05": 2, "mbarrier": 2, "barrier": 3, "ld": 2, "st": 2, "atom": 2, "red": 2}


def line_of(instr: Instr) -> str:
    """The line of Python without folders, such as "gemm.py:81"; without one, that of PTX."""
    return instr.source.rpartition("/")[2] or f"PTX line {instr.line}"


def short(opcode: str) -> str:
    """Return the opcode without most of its qualifiers, for use next to the whole instruction."""
    parts = opcode.split(".")
    return ".".join(parts[: _WORDS.get(parts[0], 1)])
