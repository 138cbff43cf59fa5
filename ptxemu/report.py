"""What a launch leaves behind: counts per warp and opcode, bytes per path, timeline, findings."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Finding:
    """What a check noticed without stopping the launch. `check` is its name."""

    check: str
    message: str


@dataclass
class LaunchReport:
    """One kernel launch. Warp indices are within the CTA; counts are summed over all CTAs."""

    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    by_warp: dict[int, Counter] = field(default_factory=dict)  # warp -> opcode -> warp-instructions
    bytes: Counter = field(default_factory=Counter)  # path such as "tma.load" -> bytes
    counts: Counter = field(default_factory=Counter)  # unit such as "tma.load" -> operations
    seconds: float = 0.0
    findings: list[Finding] = field(default_factory=list)
    trace: object | None = None

    @property
    def warp_instructions(self) -> int:
        """Warp-instructions executed, over all warps and CTAs."""
        return sum(sum(counter.values()) for counter in self.by_warp.values())


@dataclass
class Report:
    """All launches of one host call, in order."""

    launches: list[LaunchReport] = field(default_factory=list)

    @property
    def findings(self) -> list[Finding]:
        return [finding for launch in self.launches for finding in launch.findings]

    @property
    def warp_instructions(self) -> int:
        return sum(launch.warp_instructions for launch in self.launches)

    @property
    def seconds(self) -> float:
        return sum(launch.seconds for launch in self.launches)
