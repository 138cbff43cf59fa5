"""Who waits for whom: named edges between roles, as data.

An edge carries one payload from a producer role to a consumer role through `stages` buffers.
Stage s is full when the producer has signalled it. What makes it empty again is either a signal
of the consumer (`release`, an mbarrier of its own: a ring) or another edge on which the same
consumer answers (`freed_by`: no second barrier is needed, an event).
"""

from __future__ import annotations

from dataclasses import dataclass

from kernelkit import hw
from kernelkit.arrivals import Signal, arrivals
from kernelkit.warps import RolePlan


@dataclass(frozen=True)
class Edge:
    """One payload, from `producer` to `consumer`.

    tx_bytes: bytes per stage that TMA announces (0 for other signals).
    freed_by: name of the edge that answers this one, 'exit' when a stage is filled once.
    """

    name: str
    producer: str
    consumer: str
    stages: int
    signal: Signal
    payload: str
    tx_bytes: int = 0
    release: Signal | None = None
    freed_by: str | None = None

    @property
    def barriers(self) -> int:
        """mbarriers of the edge: `stages` full ones, and as many empty ones for a ring."""
        return self.stages * (2 if self.release else 1)


@dataclass(frozen=True)
class EdgePlan:
    """All edges of a CTA over its roles."""

    roles: RolePlan
    edges: tuple[Edge, ...]

    def __getitem__(self, name: str) -> Edge:
        """The edge of that name; KeyError lists the names there are."""
        for edge in self.edges:
            if edge.name == name:
                return edge
        raise KeyError(f"no edge {name!r}; edges are {[edge.name for edge in self.edges]}")

    def full_arrivals(self, name: str) -> int:
        """Arrivals that fill one stage."""
        edge = self[name]
        return arrivals(self.roles[edge.producer], edge.signal)

    def empty_arrivals(self, name: str) -> int:
        """Arrivals that empty one stage of a ring."""
        edge = self[name]
        if edge.release is None:
            raise ValueError(f"edge {name} has no empty barrier: it is freed by {edge.freed_by}")
        return arrivals(self.roles[edge.consumer], edge.release)

    @property
    def barrier_bytes(self) -> int:
        """Shared memory that all mbarriers take."""
        return sum(edge.barriers for edge in self.edges) * hw.MBARRIER_BYTES

    def check(self) -> None:
        """Raise ValueError or KeyError for an edge that names nobody or is never freed."""
        names = [edge.name for edge in self.edges]
        if len(set(names)) != len(names):
            raise ValueError(f"edge names repeat: {names}")
        for edge in self.edges:
            self.full_arrivals(edge.name)
            if edge.stages < 1:
                raise ValueError(f"edge {edge.name} has {edge.stages} stages, at least 1")
            if (edge.tx_bytes > 0) != (edge.signal is Signal.TMA):
                raise ValueError(f"edge {edge.name}: {edge.tx_bytes} bytes over {edge.signal}")
            if (edge.release is None) == (edge.freed_by is None):
                raise ValueError(f"edge {edge.name} needs either a release or a freed_by")
            if edge.release is not None:
                self.empty_arrivals(edge.name)
            elif edge.freed_by != "exit":
                self._check_answer(edge)

    def _check_answer(self, edge: Edge) -> None:
        answer = self[edge.freed_by]
        if (answer.producer, answer.consumer) != (edge.consumer, edge.producer):
            raise ValueError(
                f"edge {edge.name} ({edge.producer} -> {edge.consumer}) cannot be freed by "
                f"{answer.name} ({answer.producer} -> {answer.consumer})"
            )
