"""Vector clocks of a cluster: what each agent knows to have happened, and in which sense.

A component is anything with an order of steps: a warp, the phases of an mbarrier, the tcgen05
operations that one warp issues, its bulk stores. A clock holds the last known step of every
component. Its rows are the senses. Knowing that something was executed is weaker than knowing its
memory accesses to be ordered, which is weaker than knowing them visible to the async proxy.

An access is stamped with (component, step, lane, site). It is ordered before an agent's next access
if that agent's clock has reached its step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ptxemu.numerics import PerLane

# Sets of lanes that made an access together, and knowledge of lanes about one another.
#
# Lanes are threads: an access of one is ordered before an access of another by bar.warp.sync, by a
# barrier or mbarrier that both use, and by nothing else. The PTX ISA promises memory ordering among
# the participating threads in the section "bar.warp.sync" alone. "vote.sync", "shfl.sync",
# "match.sync", "redux.sync" and "elect.sync" make a thread wait for the others of its member mask;
# their sections do not mention memory. The CUDA C++ Programming Guide adds that the vote, match,
# reduce and shuffle functions imply no memory barrier, and that __syncwarp does.
#
# An access by converged lanes in one instruction counts for each of them: a later access of some of
# these lanes follows it in program order.

LANES = 32
_FIRST, _END = LANES, 62  # codes of sets of several lanes; those above say that lanes do not matter
NOBODY = 63  # as `clocks.ALL_LANES`: the access of no lane in particular


class LaneSets:
    """Sets of lanes by a code that fits into a stamp. A lane is its own code."""

    def __init__(self) -> None:
        self.masks = np.zeros(NOBODY + 1, np.int64)
        self.masks[:LANES] = 1 << np.arange(LANES, dtype=np.int64)
        self.address = self.masks.ctypes.data  # they are changed in place
        self._codes: dict[int, int] = {}

    def code(self, mask: int) -> int:
        """Return the code of a set of lanes, or NOBODY if there are too many different sets."""
        if mask & (mask - 1) == 0:
            return mask.bit_length() - 1
        code = self._codes.get(mask)
        if code is None:
            code = _FIRST + len(self._codes)
            if code == _END:
                return NOBODY
            self._codes[mask] = code
            self.masks[code] = mask
        return code

    def differ(self, was: int | np.ndarray, now: int | np.ndarray) -> np.ndarray:
        """Return whether some lane of `now` is not in `was`; always false for NOBODY."""
        before = self.masks[was]
        return np.asarray((before != 0) & (self.masks[now] & ~before != 0))


class Met:
    """Knowledge of lanes about one another after bar.warp.sync of some lanes.

    int64 [knowing lane, known lane] is the step below which accesses are known. The array is never
    changed, as operations keep it.
    """

    def __init__(self, steps: np.ndarray) -> None:
        self._steps = steps

    @classmethod
    def behind(cls, before: Met | None, synced: int, members: int, now: int) -> Met:
        """Synchronise the lanes `members` at the beginning of step `now`; they share their
        knowledge."""
        shape = (LANES, LANES)
        steps = before._steps.copy() if before is not None else np.full(shape, synced, np.int64)
        lanes = _listed(members)
        known = np.maximum(steps[lanes].max(axis=0), synced)
        known[lanes] = now
        steps[lanes] = known
        return cls(steps)

    def knows(self, now: int, was: int, step: int) -> bool:
        """Whether all lanes of `now` know what those of `was`, both masks, did in `step`."""
        apart = self._steps[np.ix_(_listed(now & ~was), _listed(was))]
        return bool((step < apart).all())


def masks_named(members: PerLane, executing: int) -> list[int]:
    """The member masks that the lanes `executing` name, each once."""
    if np.ndim(members) == 0:
        return [int(members)]
    lanes = _listed(executing)
    return [int(mask) for mask in np.unique(np.asarray(members)[lanes])]


def not_named(members: PerLane, executing: int) -> int:
    """Return the executing lanes that are not in the mask they pass."""
    if np.ndim(members) == 0:
        return executing & ~int(members)
    masks = np.asarray(members).tolist()
    return sum(1 << lane for lane in _listed(executing) if not masks[lane] >> lane & 1)


def _listed(mask: int) -> list[int]:
    return [lane for lane in range(LANES) if mask >> lane & 1]


# Rows of a clock.
EXECUTED = 0  # it has happened: the knowledge a relaxed barrier gives
ORDERED = 1  # its accesses come first: release and acquire
ASYNC_SHARED = 2  # and the async proxy sees those to shared memory: fence.proxy.async
ASYNC_GLOBAL = 3  # and those to global memory
INITIALISED = 4  # mbarrier.init is seen by the async proxy and by peers: fence.mbarrier_init
FENCED = 5  # what a relaxed arrival releases: all before the last fence
ROWS = 6

_FIRST_CAPACITY = 128

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
    """Component of the clocks.

    Attributes:
        kind: Key of `explain.MISSING`.
        agent: Name of the agent that makes the steps.
        owner: Clock of the warp whose asynchronous operations they are.
    """

    kind: str
    agent: str
    asynchronous: bool = True  # completes by a mechanism of its own; no proxy fence is needed
    owner: Any = None


@dataclass
class Components:
    """Components of one cluster. Number 0 is nobody; its step 0 is known to all."""

    known: list[Component] = field(default_factory=lambda: [Component("nobody", "")])
    asynchronous: np.ndarray = field(default_factory=lambda: np.zeros(_FIRST_CAPACITY, np.bool_))
    executed: np.ndarray = field(default_factory=lambda: np.zeros(_FIRST_CAPACITY, np.bool_))
    lane_sets: LaneSets = field(default_factory=LaneSets)
    # what its warps were told of another cluster, by index: (component, its step then, rows)
    foreign: dict[int, list[tuple[int, int, np.ndarray]]] = field(default_factory=dict)

    def add(self, kind: str, agent: str, *, asynchronous: bool = True, owner: Any = None) -> int:
        """Add a component and return its number.

        For an allocation, and for bytes that landed in shared memory, only execution matters. A
        relaxed barrier orders that as well (`executed`): CUTLASS's tma_multicast.py informs a peer
        of its tile by barrier.cluster.arrive.relaxed.
        """
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
    """Merge `other` into `clock`, in place if it is large enough."""
    have, more = clock.shape[1], other.shape[1]
    if more == have:
        np.maximum(clock, other, out=clock)
        return clock
    if more > have:
        larger = np.zeros((ROWS, more), np.int32)
        larger[:, :have] = clock
        clock = larger
    part = clock[:, :more]
    np.maximum(part, other, out=part)
    return clock


class Mark(NamedTuple):
    """Mark of an access in a shadow: its stamp without lanes, and its lane.

    The lane may be an array with an entry for each start of its cells.
    """

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
