"""Order of edits of tensor maps in kernels.

The tensormap proxy sees the generic proxy's writes to global memory only after two fences. Sources
are PTX ISA "membar / fence" (fence.proxy.tensormap::generic is a unidirectional proxy fence) and
the example of "tensormap.replace":

    write  ->  fence.proxy.tensormap::generic.release  ->  fence...acquire [map], 128  ->  use

Each is ordered after the previous one. tensormap.cp_fenceproxy is a write with its release.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ptxemu.check import evidence
from ptxemu.check.agents import Agent, WarpClock, foreign_seen
from ptxemu.check.clocks import ALL_LANES, ORDERED, Mark, Stamp, stamp
from ptxemu.check.findings import Conflicts, Findings, Side
from ptxemu.check.global_memory import GlobalShadow, Piece
from ptxemu.check.state import States
from ptxemu.machine.state import Warp

MAP_BYTES = 128
_SECTION = "membar / fence, fence.proxy.tensormap; tensormap.replace"
RELEASE = ("fence.proxy.tensormap::generic.release after the write of the tensor map", _SECTION)
ACQUIRE = (
    "fence.proxy.tensormap::generic.acquire of the tensor map, after the release and before "
    "the use",
    _SECTION,
)


@dataclass(frozen=True, eq=False)
class _Fence:
    """A fence of a warp. seen: what it was ordered after, as steps of components, by cluster."""

    cluster: int
    component: int
    step: int
    seen: dict[int, np.ndarray]

    @classmethod
    def by(cls, w: Warp, clock: WarpClock) -> _Fence:
        cluster = w.cluster.index
        seen = {each: foreign_seen(clock, each, False) for each in clock.components.foreign}
        seen[cluster] = clock.rows[ORDERED].copy()
        return cls(cluster, clock.own, clock.now, seen)

    def behind(self, cluster: int, component: int, step: int) -> bool:
        return _reaches(self.seen.get(cluster), component, step)

    def before(self, by: Agent, cluster: int) -> bool:
        """Return whether `by`, of `cluster`, is ordered after the fence."""
        near = cluster == self.cluster
        seen = by.rows[ORDERED] if near else foreign_seen(by, self.cluster, False)
        return _reaches(seen, self.component, self.step)


def _reaches(seen: np.ndarray | None, component: int, step: int) -> bool:
    return seen is not None and component < len(seen) and bool(seen[component] >= step)


@dataclass
class TensorMaps:
    """Fences of tensor maps in one launch. `memory`: its writers of global memory."""

    states: States
    findings: Findings
    memory: GlobalShadow
    _releases: list[_Fence] = field(default_factory=list)
    _acquires: dict[int, list[_Fence]] = field(default_factory=dict)

    def fence(self, w: Warp, address: int | None) -> None:
        """fence.proxy.tensormap::generic, .acquire of an address or .release of all."""
        clock = self.states.clocks[w]
        fences = self._releases if address is None else self._acquires.setdefault(address, [])
        fences.append(_Fence.by(w, clock))
        clock.advance()

    def used(self, w: Warp, address: int) -> None:
        """An instruction reads the tensor map at a generic address when it is issued."""
        if not self.memory.may_have_written(address, address + MAP_BYTES):
            return
        clock, cluster = self.states.clocks[w], w.cluster.index
        mark = Mark(stamp(clock.own, clock.now, ALL_LANES, w.at), ALL_LANES)
        piece = Piece(np.array([address], np.int64), MAP_BYTES, cluster, mark)
        for written, owner in self.memory.writes(piece):
            earlier = Stamp.of(written)
            missing = self._missing(clock, cluster, address, (owner, earlier))
            if missing is not None:
                self._report(w, address, (owner, earlier), missing)

    def _missing(
        self, by: WarpClock, cluster: int, address: int, written: tuple[int, Stamp]
    ) -> tuple[str, str] | None:
        owner, earlier = written
        where = (owner, earlier.component, earlier.step)
        releases = [each for each in self._releases if each.behind(*where)]
        if not releases:
            return RELEASE
        for acquire in self._acquires.get(address, ()):
            heard = any(acquire.behind(r.cluster, r.component, r.step) for r in releases)
            if heard and acquire.before(by, cluster):
                return None
        if any(release.before(by, cluster) for release in releases):
            return ACQUIRE
        return evidence.MISSING["warp"] if owner == cluster else evidence.FLAG

    def _report(
        self, w: Warp, address: int, written: tuple[int, Stamp], missing: tuple[str, str]
    ) -> None:
        owner, earlier = written
        place = ("global memory", address, address + MAP_BYTES - 1)
        known = [self.states.clusters[each].components.known for each in (owner, w.cluster.index)]
        clock = self.states.clocks[w]
        before = Side(*place, known[0], earlier, True)
        now = Side(*place, known[1], Stamp(clock.own, clock.now, ALL_LANES, w.at), False)
        Conflicts(self.findings).report(before, now, missing)
