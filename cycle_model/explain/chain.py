"""The critical chain: backwards from the last instruction, always to what let it go.

Each link is the time between two issues: of a warp's own previous instruction, of the one whose
result it waited for, of the one that held its pipe, or of the one, of whatever warp, that completed
the barrier it slept on. The links of a chain add up to the time of the launch.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from cycle_model.engine import layout as L
from cycle_model.explain.spent import Spent

HOW = {
    L.IN_ORDER: "issue",
    L.SCOREBOARD: "result",
    L.PIPE_BUSY_REASON: "pipe",
    L.WOKEN: "barrier",
}


@dataclass(frozen=True)
class Link:
    """From one issue to another. how: of `HOW`. begin, end: cycles."""

    role: str
    how: str
    source: str
    source_role: str
    target: str
    begin: int
    end: int

    @property
    def cycles(self) -> int:
        return self.end - self.begin


def chain(spent: Spent) -> list[Link]:
    """From the first instruction to the last."""
    log, tables = spent.log, spent.result.tables
    code = tables.function.instructions
    if not len(log):
        return []

    def text(at: int) -> str:
        return code[tables.path[log[at, L.L_POSITION]]].opcode

    links = []
    at = len(log) - 1
    while at >= 0:
        before = int(log[at, L.L_CAUSE])
        begin = int(log[before, L.L_TIME]) if before >= 0 else 0
        role = spent.role(int(log[at, L.L_WARP]))
        source = spent.role(int(log[before, L.L_WARP])) if before >= 0 else ""
        how = HOW[int(log[at, L.L_REASON])]
        links.append(
            Link(
                role,
                how,
                text(before) if before >= 0 else "start",
                source,
                text(at),
                begin,
                int(log[at, L.L_TIME]),
            )
        )
        at = before
    return links[::-1]


def summary(links: list[Link]) -> list[tuple[str, str, int, int]]:
    """(who, what, times, cycles) of links that are alike, the longest first."""
    total: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for link in links:
        if link.how == "issue":
            what = f"issues {link.source}"
        elif link.how == "barrier":
            what = f"waits for {link.source} of {link.source_role}"
        else:
            what = f"{link.how} of {link.source}"
        kept = total[link.role, what]
        kept[0] += 1
        kept[1] += link.cycles
    found = [(who, what, times, cycles) for (who, what), (times, cycles) in total.items()]
    return sorted(found, key=lambda row: -row[3])
