"""Who accesses memory: warps, and the asynchronous operations that they issue."""

from __future__ import annotations

import numpy as np

from ptxemu.check.clocks import (
    ALL_LANES,
    ASYNC_GLOBAL,
    ASYNC_SHARED,
    EXECUTED,
    FENCED,
    INITIALISED,
    ORDERED,
    Components,
    fresh,
    join,
    stamp,
)

_PROXY = {"shared": ASYNC_SHARED, "global": ASYNC_GLOBAL}


class WarpClock:
    """What a warp knows. `own` is its component, `now` its step there; a step ends where others may
    learn of what came before. `synced`: the step in which its lanes last came together.

    `streams`: components of its asynchronous operations by kind, with how many were issued.
    """

    def __init__(self, components: Components, agent: str, cta: object) -> None:
        self.components = components
        self.agent = agent
        self.cta = cta
        self.own = components.add("warp", agent, asynchronous=False)
        self.rows = fresh(components)
        self.now = 0
        self.streams: dict[str, int] = {}
        self.issued: dict[str, int] = {}
        self.groups: dict[str, list[int]] = {}
        self.waited: set[int] = set()
        self.advance()
        self.synced = self.now

    def seen(self, write: bool, space: str) -> np.ndarray:
        return self.rows[ORDERED]

    def advance(self) -> None:
        """A new step."""
        self.now += 1
        if self.rows.shape[1] <= self.own:
            self.rows = join(self.rows, fresh(self.components))
        self.rows[EXECUTED, self.own] = self.rows[ORDERED, self.own] = self.now

    def together(self) -> None:
        """The lanes of the warp met, and memory is ordered between them."""
        self.advance()
        self.synced = self.now

    def learn(self, other: np.ndarray) -> None:
        self.rows = join(self.rows, other)

    def release(self, *, relaxed: bool = False) -> np.ndarray:
        """What an arrival tells."""
        told = self.rows.copy()
        if relaxed:
            known = self.components.executed[: told.shape[1]]
            told[ORDERED] = np.where(known, told[ORDERED], told[FENCED])
            for row in (ASYNC_SHARED, ASYNC_GLOBAL):
                np.minimum(told[row], told[FENCED], out=told[row])
        told[FENCED] = 0
        self.advance()
        return told

    def fence(self) -> None:
        """fence.acq_rel and stronger: later relaxed arrivals release what came before."""
        self.rows[FENCED] = self.rows[ORDERED]
        self.advance()

    def fence_proxy(self, spaces: tuple[str, ...]) -> None:
        for space in spaces:
            row = self.rows[_PROXY[space]]
            np.maximum(row, self.rows[ORDERED], out=row)
        self.advance()

    def fence_init(self) -> None:
        row = self.rows[INITIALISED]
        np.maximum(row, self.rows[ORDERED], out=row)
        self.advance()

    # -- streams of asynchronous operations ---------------------------------------------------

    def stream(self, kind: str) -> int:
        """The component of the operations of `kind`, made on first use."""
        if kind not in self.streams:
            self.streams[kind] = self.components.add(kind, self.agent)
            self.issued[kind] = 0
            self.groups[kind] = []
        return self.streams[kind]

    def issue(self, kind: str) -> tuple[int, int]:
        """(component, step) of one more operation."""
        component = self.stream(kind)
        self.issued[kind] += 1
        return component, self.issued[kind]

    def commit(self, *kinds: str) -> None:
        """A group ends."""
        for kind in kinds:
            self.stream(kind)
            self.groups[kind].append(self.issued[kind])

    def wait_groups(self, kind: str, allowed: int) -> None:
        """All groups but the newest `allowed` have completed."""
        groups = self.groups.get(kind, [])
        done = len(groups) - allowed
        if done > 0:
            self.complete(kind, groups[done - 1])

    def complete(self, kind: str, step: int | None = None) -> None:
        """Operations up to `step` (None: all) have completed, and the warp knows."""
        component = self.streams.get(kind)
        if component is not None:
            self.know(component, self.issued[kind] if step is None else step)

    def know(self, component: int, step: int) -> None:
        """Everything of `component` up to `step` has happened."""
        if component >= self.rows.shape[1]:
            self.rows = join(self.rows, fresh(self.components))
        for row in (EXECUTED, ORDERED):
            self.rows[row, component] = max(self.rows[row, component], step)


class Ticket:
    """An asynchronous operation, with what its warp knew when it was issued. It runs in the async
    proxy: of ordinary accesses it is ordered after those that a proxy fence made visible.

    In-order units: it is also ordered after earlier operations of its own `stream`.
    """

    __slots__ = ("rows", "own", "synced", "lane", "site", "component", "step", "_seen", "agent")

    def __init__(self, by: WarpClock, lane: int, site: int, kind: str = "") -> None:
        self.rows = by.rows.copy()
        self.own = by.own
        self.synced = by.synced
        self.lane = lane
        self.site = site
        self.agent = by
        self.component, self.step = by.issue(kind) if kind else (0, 0)
        if kind and self.component < self.rows.shape[1]:
            self.rows[ORDERED, self.component] = self.step - 1
        self._seen: dict[str, np.ndarray] = {}

    def seen(self, write: bool, space: str) -> np.ndarray:
        row = _PROXY.get(space)
        if not write or row is None:
            return self.rows[ORDERED]
        if space not in self._seen:
            known = self.rows.shape[1]
            asynchronous = self.agent.components.asynchronous[:known]
            self._seen[space] = np.where(asynchronous, self.rows[ORDERED], self.rows[row])
        return self._seen[space]

    def told(self) -> np.ndarray:
        """What its completion tells: that it was issued, what it was itself ordered after, and for
        an in-order unit that all its operations up to this one are complete."""
        rows = np.zeros_like(self.rows)
        for row in (EXECUTED, INITIALISED):
            rows[row] = self.rows[row]
        rows[ORDERED] = rows[ASYNC_SHARED] = self.seen(True, "shared")
        if self.component:
            if self.component >= rows.shape[1]:
                rows = join(rows, fresh(self.agent.components))
            rows[EXECUTED, self.component] = rows[ORDERED, self.component] = self.step
        return rows

    def mark(self, component: int, step: int) -> int:
        return stamp(component, step, ALL_LANES, self.site)


class PhaseClock:
    """What the phases of an mbarrier tell. Phase n of it is step n + 1 of its component."""

    def __init__(self, components: Components, agent: str) -> None:
        self.components = components
        self.agent = agent
        self.component = components.add("mbarrier", agent)
        self.gathered = fresh(components)
        self.phases: list[np.ndarray] = []
        self.initialised = (0, 0)  # component and step of its mbarrier.init
        self.init_site = 0

    def arrive(self, told: np.ndarray) -> None:
        self.gathered = join(self.gathered, told)

    def completed(self) -> None:
        told = self.gathered
        if self.component >= told.shape[1]:
            told = self.gathered = join(told, fresh(self.components))
        told[EXECUTED, self.component] = told[ORDERED, self.component] = len(self.phases) + 1
        self.phases.append(told.copy())

    def wait(self, by: WarpClock, parity: int) -> None:
        """What a successful wait is sure to tell, in any schedule: a phase of this parity behind
        those that `by` already knows of, none if one that it knows is of this parity."""
        known = int(by.rows[EXECUTED, self.component]) if self.component < by.rows.shape[1] else 0
        phase = known if (known & 1) != parity else known + 1
        if phase:
            by.learn(self.phases[min(phase, len(self.phases)) - 1])
