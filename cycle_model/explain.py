"""Explanations of a kernel's time: where cycles go, the critical chain, a timeline."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cycle_model.engine import layout as L
from cycle_model.engine.simulate import Result
from ptxemu.trace import Trace

PIPES = {L.FMA: "FMA", L.ALU: "ALU", L.SPECIAL: "MUFU", L.UNIFORM: "uniform"}
PIPES |= {L.TENSOR: "mma.sync and wgmma"}
OF_WGMMA = 3  # kind of a group, see `engine.effects.by_group`


@dataclass(frozen=True)
class Spot:
    """An instruction of a role.

    Attributes:
        times: Number of times it was issued.
        cycles: Sum of the cycles from each issue to the warp's next one.
    """

    role: str
    address: int
    text: str
    times: int
    cycles: int


class Spent:
    """Breakdown of the time of a logged simulation.

    roles maps a warp's index in its CTA to a role. names maps an mbarrier's offset in shared memory
    to a name.
    """

    def __init__(
        self,
        result: Result,
        roles: dict[int, str] | None = None,
        names: dict[int, str] | None = None,
    ) -> None:
        if result.log is None:
            raise ValueError("the simulation was not logged: simulate(..., log=True)")
        self.result, self.roles, self.names = result, roles or {}, names or {}
        self.log = result.log[: result.issued]

    def role(self, number: int) -> str:
        """Return the role of a warp of the simulation."""
        index = self.result.tables.placed[number].warp.record.index
        return self.roles.get(index, f"warp {index}")

    def barrier(self, offset: int) -> str:
        """The plan's name of an mbarrier, or its address."""
        return self.names.get(offset, f"mbarrier {offset:#x}")

    @cached_property
    def after(self) -> np.ndarray:
        """The time of the next issue of the same warp, or the end of the simulation."""
        warps, times = self.log[:, L.L_WARP], self.log[:, L.L_TIME]
        order = np.argsort(warps, kind="stable")
        after = np.empty(len(order), np.int64)
        after[:-1], after[-1] = times[order][1:], -1
        last = np.append(warps[order][1:] != warps[order][:-1], True)
        after[last] = times[order][last] + 1
        out = np.empty(len(order), np.int64)
        out[order] = after
        return out

    def spots(self) -> list[Spot]:
        """Return all instructions of all roles, the costliest first."""
        items = self.result.tables.path[self.log[:, L.L_POSITION]]
        cycles = self.after - self.log[:, L.L_TIME]
        total: defaultdict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0])
        roles = [self.role(number) for number in range(len(self.result.tables.placed))]
        for warp, item, spent in zip(
            self.log[:, L.L_WARP].tolist(), items.tolist(), cycles.tolist(), strict=True
        ):
            kept = total[roles[warp], item]
            kept[0] += 1
            kept[1] += spent
        code = self.result.tables.function.instructions
        found = [
            Spot(role, code[item].address, code[item].text, times, spent)
            for (role, item), (times, spent) in total.items()
        ]
        return sorted(found, key=lambda spot: (-spot.cycles, spot.address))

    def waits(self) -> Counter[tuple[str, str]]:
        """Count cycles by (role, what it waited for), beyond those of the wait itself."""
        tables = self.result.tables
        names = {number: where for where, number in tables.barriers.items()}
        found: Counter[tuple[str, str]] = Counter()
        positions = self.log[:, L.L_POSITION]
        numbers = tables.numbers[positions]
        for at in np.flatnonzero(numbers >= 0).tolist():
            event = tables.events[numbers[at]]
            spent = int(self.after[at] - self.log[at, L.L_TIME])
            role = self.role(int(self.log[at, L.L_WARP]))
            if event[L.WHAT] == L.E_WAIT:
                barrier = tables.signals[event[L.SIGNALS], L.S_BARRIER]
                _, (rank, offset) = names[int(barrier)]
                found[role, f"{self.barrier(offset)} of CTA {rank}"] += spent
            elif event[L.WHAT] == L.E_BARRIER:
                found[role, f"barrier {event[L.A]}"] += spent
            elif event[L.WHAT] == L.E_CLUSTER_WAIT:
                found[role, "cluster barrier"] += spent
            elif event[L.WHAT] == L.E_GROUP_WAIT:
                kind = "wgmma" if event[L.B] == OF_WGMMA else "copies"
                found[role, f"groups of {kind}"] += spent
        return found

    def shares(self) -> dict[str, float]:
        """Return the share of time each pipe is busy, on its busiest SM."""
        state, cycles = self.result.state, max(self.result.cycles, 1)
        sms = int(state[L.SMS])
        found: dict[str, float] = {}
        for pipe, name in PIPES.items():
            places = [
                L.SCHEDULER + k * L.SCHEDULER_WORDS + L.PIPE_BUSY + pipe
                for k in range(sms * L.SCHEDULERS)
            ]
            busy = np.array([state[place] for place in places]).reshape(sms, -1)
            found[name] = float(busy.mean(axis=1).max()) / cycles
        for name, word, unit in (
            ("tensor core", L.TENSOR_BUSY, L.PART),
            ("TMA", L.TMA_BUSY, L.PART),
            ("LSU", L.LSU_BUSY, 1),
        ):
            most = max(int(state[L.SM + k * L.SM_WORDS + word]) for k in range(sms))
            found[name] = most / unit / cycles
        found["issue"] = self.result.issued / cycles / sms / L.SCHEDULERS
        return found


# The critical chain: backwards from the last instruction, always to the cause of its issue.
#
# Each link is the time between two issues. The earlier one is the warp's previous instruction, the
# producer of an awaited result, the instruction that held the pipe, or the instruction of any warp
# that completed the awaited barrier. The links of a chain add up to the time of the launch.

HOW = {
    L.IN_ORDER: "issue",
    L.SCOREBOARD: "result",
    L.PIPE_BUSY_REASON: "pipe",
    L.WOKEN: "barrier",
}


@dataclass(frozen=True)
class Link:
    """A dependence of one issue on another, from cycle `begin` to `end`; `how` is one of `HOW`."""

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
    """Return the chain of dependences from the first instruction to the last."""
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
    """Return (role, kind, times, cycles) of links that are alike, the longest first."""
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


TIME_UNIT = "modelled cycles"
_LEAST = 16  # cycles of a wait that is shown
_WAITS = {L.E_WAIT: "mbarrier", L.E_BARRIER: "barrier", L.E_CLUSTER_WAIT: "cluster"}
_WAITS |= {L.E_GROUP_WAIT: "copies"}
_UNITS = {
    L.E_LOAD: ("TMA loads", "load", "tma"),
    L.E_STORE: ("TMA stores", "store", "tma"),
    L.E_MMA: ("tensor core", "MMA", "mma"),
    L.E_WGMMA: ("tensor core", "wgmma", "mma"),
}


def timeline(spent: Spent) -> Trace:
    """Spans by CTA, of its warps and of the units that work for them."""
    tables = spent.result.tables
    trace = Trace(time=TIME_UNIT)
    names = {number: where for where, number in tables.barriers.items()}
    log, after = spent.log, spent.after
    for number, placed in enumerate(tables.placed):
        own = np.flatnonzero(log[:, L.L_WARP] == number)
        agent, began = f"warp {placed.warp.record.index}", None
        for at in own.tolist():
            time, end = int(log[at, L.L_TIME]), int(after[at])
            began = time if began is None else began
            event = tables.numbers[log[at, L.L_POSITION]]
            what = int(tables.events[event, L.WHAT]) if event >= 0 else -1
            if what in _UNITS:
                unit, name, category = _UNITS[what]
                of, to = int(log[at, L.L_BEGIN]), int(log[at, L.L_END])
                trace.span(placed.cta, unit, name, of, to, category, warp=agent)
            if what not in _WAITS or end - time < _LEAST:
                continue
            trace.span(placed.cta, agent, "run", began, time, "compute")
            name = _WAITS[what]
            if what == L.E_WAIT:
                barrier = tables.signals[tables.events[event, L.SIGNALS], L.S_BARRIER]
                name = spent.barrier(names[int(barrier)][1][1])
            trace.span(placed.cta, agent, f"wait {name}", time, end, "wait")
            began = None
        if began is not None:
            trace.span(placed.cta, agent, "run", began, int(after[own[-1]]), "compute")
    return trace
