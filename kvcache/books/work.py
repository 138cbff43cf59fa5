"""Device work of a manager, and when the slots that it touches may be reused.

A `Work` is a list of copies between pools, executed in order. Each has a ticket; slots that are
given back after it was planned wait until it is over: it or work before it may still touch them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from kvcache.books.slot_pool import NO_TICKET


class Pool(Enum):
    """Location of slots; messages use the value as its name."""

    BLOCKS = "blocks"
    STATES = "states"
    CHECKPOINTS = "checkpoints"
    HOST_BLOCKS = "host blocks"
    HOST_STATES = "host states"

    @property
    def on_host(self) -> bool:
        """Whether it lies in host memory."""
        return self in (Pool.HOST_BLOCKS, Pool.HOST_STATES)


class Copy(NamedTuple):
    """A slot's bytes from one pool to another.

    position: None for the whole slot. Else what a request of so many tokens needs of its state: to
    and from CHECKPOINTS by `Layout.segments`, else by `Layout.live` at the same offsets.
    """

    source: Pool
    target: Pool
    source_slot: int
    target_slot: int
    position: int | None = None


class Mark(NamedTuple):
    """A checkpoint at a boundary inside a step, which the layers of the step write themselves.

    owner: index of the request in the step.
    boundary: tokens of the request before the boundary.
    slot: in CHECKPOINTS.
    """

    owner: int
    boundary: int
    slot: int


class Event(Protocol):
    """Like torch.cuda.Event."""

    def query(self) -> bool:
        """Whether all work before it is over."""


@dataclass(eq=False)
class Work:
    """Copies that the device executes.

    copies: executed before anything else of the work.
    ticket: see `Tickets`.
    """

    ticket: int = NO_TICKET
    copies: tuple[Copy, ...] = ()


@dataclass
class Tickets:
    """Works that are not over, in the order of their planning.

    Not deferred, every work counts as over once it is planned: right where one thread or stream
    executes everything in order.
    """

    deferred: bool
    last: int = NO_TICKET
    # Whether a work is over, None before it is on its way.
    _events: dict[int, Callable[[], bool] | None] = field(default_factory=dict)

    def take(self) -> int:
        """A ticket for new work."""
        if self.deferred:
            self.last += 1
            self._events[self.last] = None
        return self.last

    def issued(self, ticket: int, event: Event | None) -> None:
        """The work is on its way, and over once `event` says so; now without one."""
        if ticket not in self._events:
            if not self.deferred:
                return
            raise ValueError(f"ticket {ticket}: no such work in flight, the last is {self.last}")
        self._events[ticket] = event.query if event else lambda: True

    def over(self) -> int:
        """The last ticket such that it and all before it are over."""
        while self._events:
            ticket, is_over = next(iter(self._events.items()))
            if is_over is None or not is_over():
                return ticket - 1
            del self._events[ticket]
        return self.last

    @property
    def in_flight(self) -> int:
        """Works that are not known to be over."""
        return len(self._events)
