"""Vector clocks of a cluster: what each agent knows to have happened, and in which sense.

A component is whatever makes steps in an order of its own: a warp, the phases of an mbarrier, the
tcgen05 operations that one warp issues, its bulk stores. A clock says of every component up to
which step it is known. Rows are the senses: that something was executed is less than that its
memory accesses are ordered, and that is less than that the async proxy sees them.

An access is stamped with (component, step, lane, site); it is ordered before an agent's next access
if that agent's clock has reached its step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ptxemu.check.lanes import NOBODY, LaneSets

# Rows of a clock.
EXECUTED = 0  # it has happened: what a relaxed barrier tells
ORDERED = 1  # its accesses come first: release and acquire
ASYNC_SHARED = 2  # and the async proxy sees those to shared memory: fence.proxy.async
ASYNC_GLOBAL = 3  # and those to global memory
INITIALISED = 4  # mbarrier.init is seen by the async proxy and by peers: fence.mbarrier_init
FENCED = 5  # what a relaxed arrival releases: all before the last fence
ROWS = 6

_FIRST_CAPACITY = 64

SITE_BITS, LANE_BITS, STEP_BITS = 18, 6, 25
LANE_SHIFT = SITE_BITS
STEP_SHIFT = SITE_BITS + LANE_BITS
COMPONENT_SHIFT = STEP_SHIFT + STEP_BITS
SITE_MASK = (1 << SITE_BITS) - 1
LANE_MASK = (1 << LANE_BITS) - 1
STEP_MASK = (1 << STEP_BITS) - 1
ALL_LANES = NOBODY  # the access of no lane in particular
ATOMIC = NOBODY - 1  # an atomic or otherwise strong access: no race with another such


@dataclass(frozen=True)
class Component:
    """`kind` is a key of `explain.MISSING`; `agent` names whoever makes the steps; `owner`: the
    warp clock whose asynchronous operations they are."""

    kind: str
    agent: str
    asynchronous: bool = True  # completes by a mechanism of its own; no proxy fence is needed
    owner: Any = None


@dataclass
class Components:
    """Those of one cluster. Number 0 is nobody, whose step 0 everyone knows."""

    known: list[Component] = field(default_factory=lambda: [Component("nobody", "")])
    asynchronous: np.ndarray = field(default_factory=lambda: np.zeros(_FIRST_CAPACITY, np.bool_))
    executed: np.ndarray = field(default_factory=lambda: np.zeros(_FIRST_CAPACITY, np.bool_))
    lane_sets: LaneSets = field(default_factory=LaneSets)
    # what its warps were told of another cluster, by index: (component, its step then, rows)
    foreign: dict[int, list[tuple[int, int, np.ndarray]]] = field(default_factory=dict)

    def add(self, kind: str, agent: str, *, asynchronous: bool = True, owner: Any = None) -> int:
        """A new component. Of an allocation, and of bytes that landed in shared memory, nothing but
        their execution matters, which a relaxed barrier orders, too (`executed`): CUTLASS's
        tma_multicast.py tells a peer of its tile by barrier.cluster.arrive.relaxed."""
        number = len(self.known)
        self.known.append(Component(kind, agent, asynchronous, owner))
        if number >= self.capacity:
            more = np.zeros(number, np.bool_)
            self.asynchronous = np.concatenate([self.asynchronous, more])
            self.executed = np.concatenate([self.executed, more])
        self.asynchronous[number] = asynchronous
        self.executed[number] = kind in ("tcgen05.alloc", "mbarrier")
        return number

    @property
    def capacity(self) -> int:
        return len(self.asynchronous)


def fresh(components: Components) -> np.ndarray:
    """A clock that knows nothing: int32 (ROWS, capacity)."""
    return np.zeros((ROWS, components.capacity), np.int32)


def join(clock: np.ndarray, other: np.ndarray) -> np.ndarray:
    """`clock`, in place where it is large enough, with what `other` knows."""
    have, more = clock.shape[1], other.shape[1]
    if more > have:
        larger = np.zeros((ROWS, more), np.int32)
        larger[:, :have] = clock
        clock = larger
    part = clock[:, :more]
    np.maximum(part, other, out=part)
    return clock


class Mark(NamedTuple):
    """Of an access: its lane, or one for each start of its cells; its stamp, where there are such
    lanes without any."""

    stamp: int
    lane: int | np.ndarray

    @property
    def packed(self) -> int | np.ndarray:
        """The stamp, or one for each start."""
        if isinstance(self.lane, int):
            return self.stamp
        return self.stamp | self.lane.astype(np.int64) << LANE_SHIFT

    @property
    def first(self) -> int:
        return int(np.asarray(self.packed).flat[0])


def stamp(component: int, step: int, lane: int, site: int) -> int:
    return component << COMPONENT_SHIFT | step << STEP_SHIFT | lane << LANE_SHIFT | site


class Stamp(NamedTuple):
    """An access, read back."""

    component: int
    step: int
    lane: int
    site: int

    @classmethod
    def of(cls, packed: int) -> Stamp:
        return cls(
            packed >> COMPONENT_SHIFT,
            packed >> STEP_SHIFT & STEP_MASK,
            packed >> LANE_SHIFT & LANE_MASK,
            packed & SITE_MASK,
        )
