"""Synchronisation between roles as data: named edges.

An edge carries one payload from a producer role to a consumer role through `stages` buffers. Stage
s is full when the producer has signalled it. What makes it empty again is either a signal of the
consumer (`release`, an mbarrier of its own: a ring) or another edge on which the same consumer
answers (`freed_by`: no second barrier is needed, an event).

In a CTA pair (`ctas=2`) the role that issues MMAs plays in the leader only, CTA 0, for both; all
other roles play in each CTA. Where a barrier lies and how it is reached follows from that.

The number of arrivals that complete one phase of an mbarrier is derived from who signals. Sources:
PTX ISA, mbarrier.arrive.expect_tx (one arrival, and the bytes it announces), tcgen05.commit
(`mbarrier::arrive::one`), mbarrier.arrive (one per active thread).

In a CTA pair a thread can only wait on a barrier of its own CTA, so the barrier lies where the
waiting role plays, and `Reach` says how a signal gets there.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kernelkit.plan import hw
from kernelkit.plan.warps import Role, RolePlan


class Signal(Enum):
    """Kind of signal: the payload moved by TMA, by the tensor core, or by the role's own
    threads."""

    TMA = "tma"  # one elected thread arrives and announces bytes; the copy completes them
    UMMA = "umma"  # one elected thread commits; the tensor core arrives when it is done
    THREADS = "threads"  # every thread arrives once its own work is ordered before
    WARPS = "warps"  # one thread of each warp arrives once the warp's wgmmas are done


class Reach(Enum):
    """CTAs whose barrier a signal completes."""

    OWN = "own"  # of the CTA that signals
    LEADER = "leader"  # both CTAs of a pair signal, its leader waits
    BOTH = "both"  # the leader signals, both CTAs of the pair wait
    EACH = "each"  # both CTAs of the pair signal, and both wait for both


def arrivals(role: Role, signal: Signal, reach: Reach = Reach.OWN, every_team: bool = False) -> int:
    """Arrivals per phase on one barrier when all of `role` signals once, in every CTA it plays in.

    TMA and UMMA are issued by one elected lane, so their roles must be a single warp. The one
    arrival for TMA is the leader's, which announces the bytes of both CTAs. every_team: all teams
    of the role signal, not the one whose stage it is.
    """
    if signal in (Signal.THREADS, Signal.WARPS):
        count = role.threads if every_team else role.team_threads
        count *= 2 if reach in (Reach.LEADER, Reach.EACH) else 1
        if signal is Signal.WARPS:
            count //= hw.WARP_THREADS
    elif role.warps != 1:
        raise ValueError(
            f"role {role.name} has {role.warps} warps: {signal.value} signals come from one warp"
        )
    else:
        count = 1
    if count > hw.MBARRIER_MAX_ARRIVALS:
        raise ValueError(f"{count} arrivals, limit {hw.MBARRIER_MAX_ARRIVALS}")
    return count


@dataclass(frozen=True)
class Edge:
    """Edge for one payload, from `producer` to `consumer`.

    tx_bytes: bytes per stage that TMA brings into one CTA (0 for other signals).
    released_by: role whose signal `release` is, where that is not the consumer.
    freed_by: name of the edge that answers this one, 'exit' when a stage is filled once.
    leader_only: of a pair's CTAs the leader alone has it, whatever else its roles do in both.
    every_team: all teams of its roles take part in every stage; else stage t belongs to team t.
    multicast: each CTA of a pair brings a part of every stage into both, so that the stage is free
        once both have released it. tx_bytes: of all parts.
    """

    name: str
    producer: str
    consumer: str
    stages: int
    signal: Signal
    payload: str
    tx_bytes: int = 0
    release: Signal | None = None
    released_by: str = ""
    freed_by: str | None = None
    leader_only: bool = False
    every_team: bool = False
    multicast: bool = False

    @property
    def releaser(self) -> str:
        """Role that says that a stage is free."""
        return self.released_by or self.consumer

    @property
    def barriers(self) -> int:
        """mbarriers of the edge: `stages` full ones, and as many empty ones for a ring."""
        return self.stages * (2 if self.release else 1)


@dataclass(frozen=True)
class Completion:
    """Completion of a phase of the barriers of one direction of an edge.

    tx_bytes: bytes that the one TMA arrival announces, for all CTAs whose copies it covers.
    """

    stages: int
    signal: Signal
    reach: Reach
    arrivals: int
    tx_bytes: int


@dataclass(frozen=True)
class EdgePlan:
    """All edges of a CTA, or of each CTA of a pair, over its roles.

    pairs: pairs of a cluster; those of different pairs have no edges between them.
    """

    roles: RolePlan
    edges: tuple[Edge, ...]
    ctas: int = 1
    pairs: int = 1

    def __getitem__(self, name: str) -> Edge:
        """The edge of that name; KeyError lists the names there are."""
        for edge in self.edges:
            if edge.name == name:
                return edge
        raise KeyError(f"no edge {name!r}; edges are {[edge.name for edge in self.edges]}")

    def has(self, name: str) -> bool:
        """Whether there is an edge of that name."""
        return any(edge.name == name for edge in self.edges)

    def leads(self, role: str) -> bool:
        """Whether `role` plays in the leader of the pair only: it issues the pair's MMAs."""
        return self.ctas == 2 and any(
            (edge.signal is Signal.UMMA and edge.producer == role)
            or (edge.release is Signal.UMMA and edge.releaser == role)
            for edge in self.edges
        )

    def full(self, name: str) -> Completion:
        edge = self[name]
        return self._completion(edge, edge.signal, edge.producer, edge.consumer, edge.tx_bytes)

    def empty(self, name: str) -> Completion:
        """Return the completion that empties one stage of a ring."""
        edge = self[name]
        if edge.release is None:
            raise ValueError(f"edge {name} has no empty barrier: it is freed by {edge.freed_by}")
        return self._completion(edge, edge.release, edge.releaser, edge.producer)

    def _completion(
        self, edge: Edge, signal: Signal, signals: str, waits: str, tx_bytes: int = 0
    ) -> Completion:
        """Return the completion of a signal from one role to the barrier on which another waits."""
        if edge.multicast and signals == edge.consumer:
            reach = Reach.EACH
        elif edge.leader_only or self.leads(signals) == self.leads(waits):
            reach = Reach.OWN
        else:
            reach = Reach.LEADER if self.leads(waits) else Reach.BOTH
        if signal is not Signal.UMMA and reach is Reach.BOTH:
            raise ValueError(f"edge {edge.name}: only UMMA signals reach both CTAs, not {signal}")
        count = arrivals(self.roles[signals], signal, reach, edge.every_team)
        both = 2 if reach is Reach.LEADER else 1
        return Completion(edge.stages, signal, reach, count, tx_bytes * both)

    @property
    def barriers(self) -> int:
        """mbarriers of all edges."""
        return sum(edge.barriers for edge in self.edges)

    @property
    def barrier_bytes(self) -> int:
        """Shared memory that they take."""
        return self.barriers * hw.MBARRIER_BYTES

    def barrier_names(self, start: int) -> dict[int | str, str]:
        """Address -> name, such as "p[0] full", of the mbarriers that lie from `start` on in the
        order of `kernelkit.device.pipelines.make_pipelines`: for `ptxemu.Options(names=...)`."""
        names = [
            f"{edge.name}[{stage}] {state}"
            for edge in self.edges
            for state in ("full", "empty")[: edge.barriers // edge.stages]
            for stage in range(edge.stages)
        ]
        return {start + hw.MBARRIER_BYTES * place: name for place, name in enumerate(names)}

    def check(self) -> None:
        """Raise ValueError or KeyError for an edge that names nobody or is never freed."""
        names = [edge.name for edge in self.edges]
        if len(set(names)) != len(names):
            raise ValueError(f"edge names repeat: {names}")
        if self.ctas not in (1, 2):
            raise ValueError(f"{self.ctas} CTAs: 1, or 2 for a pair")
        for edge in self.edges:
            self.full(edge.name)
            if edge.stages < 1:
                raise ValueError(f"edge {edge.name} has {edge.stages} stages, at least 1")
            if (edge.tx_bytes > 0) != (edge.signal is Signal.TMA):
                raise ValueError(f"edge {edge.name}: {edge.tx_bytes} bytes with {edge.signal}")
            if (edge.release is None) == (edge.freed_by is None):
                raise ValueError(f"edge {edge.name} needs either a release or a freed_by")
            if edge.release is not None:
                self.empty(edge.name)
            elif edge.freed_by is not None and edge.freed_by != "exit":
                _check_answer(edge, self[edge.freed_by])


def _check_answer(edge: Edge, answer: Edge) -> None:
    says_free = answer.releaser if answer.released_by else answer.producer
    if (says_free, answer.consumer) != (edge.consumer, edge.producer):
        raise ValueError(
            f"edge {edge.name} ({edge.producer} -> {edge.consumer}) cannot be freed by "
            f"{answer.name} ({answer.producer} -> {answer.consumer})"
        )
