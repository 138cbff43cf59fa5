"""Which lanes of a warp made an access together, and which lanes know what of one another.

Lanes are threads: an access of one is ordered before an access of another by bar.warp.sync, by a
barrier or mbarrier that both meet at, and by nothing else. The PTX ISA promises memory ordering
among the participating threads in the section "bar.warp.sync" alone. "vote.sync", "shfl.sync",
"match.sync", "redux.sync" and "elect.sync" make a thread wait for the others of its member mask and
say nothing of memory; the CUDA C++ Programming Guide adds of the vote, match, reduce and shuffle
functions that they imply no memory barrier, and of __syncwarp that it is one.

What converged lanes do in one instruction counts for each of them: a later access of some of these
lanes is behind it in program order.
"""

from __future__ import annotations

import numpy as np

from ptxemu.numerics import PerLane

LANES = 32
_FIRST, _END = LANES, 62  # codes of sets of several lanes; those above say that lanes do not matter
NOBODY = 63  # as `clocks.ALL_LANES`: the access of no lane in particular


class LaneSets:
    """Sets of lanes by the code that a stamp has room for. A lane is its own code."""

    def __init__(self) -> None:
        self.masks = np.zeros(NOBODY + 1, np.int64)
        self.masks[:LANES] = 1 << np.arange(LANES, dtype=np.int64)
        self.address = self.masks.ctypes.data  # they are changed in place
        self._codes: dict[int, int] = {}

    def code(self, mask: int) -> int:
        """Of the lanes `mask`; NOBODY where there are too many different sets."""
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
        """Whether some lane of `now` had no part in what `was` did; never of NOBODY."""
        before = self.masks[was]
        return np.asarray((before != 0) & (self.masks[now] & ~before != 0))


class Met:
    """After bar.warp.sync of some lanes: below which step of their warp a lane knows the accesses
    of another, int64 [who knows, of whom]. It is never changed, as operations keep it."""

    def __init__(self, steps: np.ndarray) -> None:
        self._steps = steps

    @classmethod
    def behind(cls, before: Met | None, synced: int, members: int, now: int) -> Met:
        """The lanes `members` meet as step `now` begins. They pass on what each of them knows."""
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
    """The executing lanes that the mask they give does not name."""
    if np.ndim(members) == 0:
        return executing & ~int(members)
    masks = np.asarray(members).tolist()
    return sum(1 << lane for lane in _listed(executing) if not masks[lane] >> lane & 1)


def _listed(mask: int) -> list[int]:
    return [lane for lane in range(LANES) if mask >> lane & 1]
