"""Record of a launch: counts, bytes per path, a timeline, and findings."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, TypeVar

from ptxemu.options import Options
from ptxemu.syntax.tree import Instr
from ptxemu.trace import Trace

ERROR, NOTE = "error", "note"
MANUAL = "manual"  # the check of what the manual alone asks for
L = TypeVar("L", bound="Launch")


def place_of(instr: Instr) -> dict[str, Any]:
    """Return the place of an instruction, in the fields of `Access` and `Finding`."""
    return {"line": instr.line, "text": instr.text, "source": instr.source}


@dataclass(frozen=True)
class Access:
    """An access in a finding: which agent touched which bytes, with which instruction.

    Attributes:
        agent: Warp on whose behalf it happened, such as "warp 4 of cta(0,0,0)".
        role: Operation, such as "tcgen05.mma". `ptxemu.check.text` describes a warp's role.
        what: "read" or "write", or another action, such as "init".
        space: "shared", "tensor" or "global"; may be longer, as "shared memory of cta(0,0,0)".
        first: First byte, or first column in tensor memory.
        last: Last byte or column, inclusive.
        line: Line of the instruction in the PTX.
        text: Text of the instruction.
        source: "path/file.py:123", if the PTX has line information.
        known_as: Range in terms of the launch, such as "parameter 2 + 1,024 bytes".
    """

    agent: str
    role: str = ""
    what: str = ""
    space: str = ""
    first: int = 0
    last: int = 0
    line: int = 0
    text: str = ""
    source: str = ""
    known_as: str = ""

    @property
    def place(self) -> tuple[Any, ...]:
        """Equal where one line of Python, or of PTX where it has no line information, does the same
        to the same kind of memory: an unrolled loop is one place."""
        return self.source or str(self.line), self.role, self.what, self.space.partition(" ")[0]

    @property
    def warp(self) -> int | None:
        """Index of the warp in its CTA, where the agent names one."""
        found = re.search(r"\bwarp (\d+)", self.agent)
        return int(found[1]) if found else None

    @property
    def cta(self) -> str:
        """Such as "cta(0,0,0)", where the agent names one."""
        found = re.search(r"cta ?\([\d, ]+\)", self.agent)
        return found[0] if found else ""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values by field name, with `warp` and `cta`."""
        return {**asdict(self), "warp": self.warp, "cta": self.cta}


@dataclass(frozen=True)
class Finding:
    """A violation that a check noticed without stopping the launch.

    Attributes:
        check: Name: race, uninitialised, tmem, mbarrier, barrier, exited, store-source, ...
        message: One sentence; for a race, the clock and the missing edge.
        severity: "error", or "note" for rules of the manual that hardware does not need.
        line: Line of the instruction that noticed it; see `Access` for text and source.
        accesses: Conflicting accesses, the earlier one first.
        missing: Instruction that is probably missing, and its place.
        rule: Section of the manual with the rule.
        why: What the launch did instead, as far as known.
    """

    check: str
    message: str
    severity: str = ERROR
    line: int = 0
    text: str = ""
    source: str = ""
    accesses: tuple[Access, ...] = ()
    missing: str = ""
    rule: str = ""
    why: str = ""

    @property
    def place(self) -> tuple[Any, ...]:
        """Equal for findings that have one cause: the same instructions, whoever executed them, in
        either order; the same words where no instruction is known."""
        sides = tuple(sorted(a.place for a in self.accesses)) or (self.source or self.line,)
        words = "" if self.line or any(access.line for access in self.accesses) else self.message
        return self.check, self.severity, sides, self.missing, words

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values by field name."""
        return {**vars(self), "accesses": [access.to_json() for access in self.accesses]}


@dataclass
class Launch:
    """A kernel launch. Warp indices are within the CTA; counts are summed over all CTAs."""

    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    # warp -> opcode -> warp-instructions; path such as "tma.load" -> bytes, and -> operations
    by_warp: dict[int, Counter[str]] = field(default_factory=dict)
    bytes: Counter[str] = field(default_factory=Counter[str])
    counts: Counter[str] = field(default_factory=Counter[str])
    seconds: float = 0.0
    findings: list[Finding] = field(default_factory=list)
    trace: Trace | None = None
    options: Options = field(default_factory=Options)
    stopped: str = ""  # the error that ended the launch early
    # of a checked launch: allocations that it wrote in part, such as "parameter 2: 64 of 128 bytes"
    partly: list[str] = field(default_factory=list)
    # and what it fetched or computed and did not use, see `ptxemu.check.unused`
    unused: list[str] = field(default_factory=list)
    processes: int = 1  # that its CTAs ran in
    alone: str = ""  # why it was one, where `Options.processes` allows more

    @property
    def warp_instructions(self) -> int:
        """Warp-instructions executed, over all warps and CTAs."""
        return sum(sum(counter.values()) for counter in self.by_warp.values())

    @property
    def errors(self) -> list[Finding]:
        """The findings that are no mere notes."""
        return [finding for finding in self.findings if finding.severity == ERROR]


@dataclass
class Launches(Generic[L]):
    """All launches of one host call, in order."""

    launches: list[L] = field(default_factory=list)

    @property
    def findings(self) -> list[Finding]:
        return [finding for launch in self.launches for finding in launch.findings]

    @property
    def errors(self) -> list[Finding]:
        return [finding for launch in self.launches for finding in launch.errors]

    @property
    def warp_instructions(self) -> int:
        return sum(launch.warp_instructions for launch in self.launches)

    @property
    def seconds(self) -> float:
        return sum(launch.seconds for launch in self.launches)
