"""Named barriers (PTX `barrier.cta`) of a CTA: who meets where, as data. Ids are assigned.

A CTA has sixteen; id 0 is the one of `sync_threads`. Device code meets at a barrier by its name,
see `kernelkit.device.barriers`.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernelkit.plan import hw
from kernelkit.plan.warps import RolePlan


@dataclass(frozen=True)
class NamedBarrier:
    """Named barrier, or `count` identical ones with consecutive ids.

    roles: names of the roles whose threads wait, or only arrive.
    threads: number of threads that complete one phase of one barrier.
    meaning: condition that holds once they have arrived.
    """

    name: str
    roles: tuple[str, ...]
    threads: int
    meaning: str
    count: int = 1


@dataclass(frozen=True)
class BarrierPlan:
    """All named barriers of a kernel, over its roles. Ids follow the order of declaration."""

    roles: RolePlan
    barriers: tuple[NamedBarrier, ...] = ()

    def __getitem__(self, name: str) -> NamedBarrier:
        """The barrier of that name; KeyError lists the names there are."""
        return self._found(name)[1]

    def ids(self, name: str) -> range:
        """Hardware ids of the barriers of that name, which no other has."""
        first, barrier = self._found(name)
        return range(first, first + barrier.count)

    def _found(self, name: str) -> tuple[int, NamedBarrier]:
        first = hw.FIRST_NAMED_BARRIER
        for barrier in self.barriers:
            if barrier.name == name:
                return first, barrier
            first += barrier.count
        names = [barrier.name for barrier in self.barriers]
        raise KeyError(f"no named barrier {name!r}; named barriers are {names}")

    def check(self) -> None:
        """Raise ValueError or KeyError, naming value and limit, for what a CTA cannot have."""
        names = [barrier.name for barrier in self.barriers]
        if len(set(names)) != len(names):
            raise ValueError(f"names of named barriers repeat: {names}")
        for barrier in self.barriers:
            most = sum(self.roles[role].threads for role in barrier.roles)
            if barrier.threads % hw.WARP_THREADS or not 0 < barrier.threads <= most:
                raise ValueError(
                    f"named barrier {barrier.name} of {barrier.threads} threads: whole warps, at "
                    f"most the {most} threads of {', '.join(barrier.roles)}"
                )
            if barrier.count < 1:
                raise ValueError(f"named barrier {barrier.name}: count {barrier.count}, at least 1")
        used = sum(barrier.count for barrier in self.barriers)
        if used > hw.NAMED_BARRIERS - hw.FIRST_NAMED_BARRIER:
            raise ValueError(
                f"{used} named barriers ({', '.join(names)}), limit "
                f"{hw.NAMED_BARRIERS - hw.FIRST_NAMED_BARRIER} besides id 0 of the whole CTA"
            )
