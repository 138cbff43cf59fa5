"""Where the cycles of each warp go: by instruction, by barrier, by role, and by pipe."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cycle_model.engine import layout as L
from cycle_model.engine.simulate import Result

PIPES = {L.FMA: "FMA", L.ALU: "ALU", L.SPECIAL: "MUFU", L.UNIFORM: "uniform"}
PIPES |= {L.TENSOR: "mma.sync and wgmma"}
OF_WGMMA = 3  # kind of a group, see `engine.effects.by_group`


@dataclass(frozen=True)
class Spot:
    """An instruction of a role. times: it was issued. cycles: from its issue to the next one of the
    warp, added up."""

    role: str
    address: int
    text: str
    times: int
    cycles: int


class Spent:
    """Of a simulation with a log. roles: of warps, by their index in a CTA; names: of mbarriers, by
    their offset in shared memory."""

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
        """Of a warp of the simulation."""
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
        """All instructions of all roles, the costliest first."""
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
        """(role, what it waited for) -> cycles beyond those of the wait itself."""
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
        """Of each pipe, how much of the time it is busy, on the SM that is busiest."""
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
