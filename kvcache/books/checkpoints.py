"""Checkpoints: copies of the state of a request, from which another may begin.

Only at the boundary of a block: there compressors wait for little (DeepSeek-V4: HCA for nothing,
CSA for the half of four rows), and a hit ends at a boundary anyway. A step may end up to `draft`
tokens behind the boundary, since rings keep that much more than the window. A step that marks may
end anywhere: its layers write the checkpoint from their own tokens (`Layout.can_mark`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvcache.books.prefix import PrefixCache
from kvcache.books.requests import Nameless, Request
from kvcache.books.work import Copy, Pool
from kvcache.checks import MAX_SLOTS, require, whole
from kvcache.layouts.layout import Layout


@dataclass(frozen=True)
class Policy:
    """Rules for which block boundaries get a checkpoint.

    every: checkpoint at multiples of so many blocks, or None.
    prompt_end: checkpoint at the last boundary that a repeated prompt can use.
    rolling: checkpoint at each boundary; a request keeps only its newest such, for its next turn.
    """

    every: int | None = None
    prompt_end: bool = True
    rolling: bool = True

    def __post_init__(self) -> None:
        for name in ("prompt_end", "rolling"):
            require(name, getattr(self, name), bool)
        if self.every is not None and whole("every", self.every, None, MAX_SLOTS) < 1:
            raise ValueError(f"a checkpoint every {self.every} blocks: at least 1, None for none")

    def wants(self, request: Request, boundary: int, block_tokens: int) -> bool:
        """Whether one at `boundary` is to stay, whatever comes behind."""
        if self.every and boundary // block_tokens % self.every == 0:
            return True
        return self.prompt_end and boundary == request.last_boundary


@dataclass
class Checkpoints:
    """The checkpoints of a prefix cache, by `policy`."""

    layout: Layout
    policy: Policy
    prefix: PrefixCache
    _rolling: dict[bytes, Request] = field(default_factory=dict)  # digest -> whose newest it is

    @property
    def on(self) -> bool:
        """Whether there are any."""
        return self.layout.has_state and self.prefix.checkpoints.slots > 0

    def room(self, request: Request, wanted: int, marks: bool = False) -> int:
        """Return how many of `wanted` tokens one append takes without missing a checkpoint.

        marks: whether the append marks, which may leave its first checkpoint behind.
        """
        start = request.length
        for boundary in self._passed(request, start, start + wanted):
            if not (marks and self._can_mark(start, boundary)):
                return boundary - start
            marks = False
        return wanted

    def _passed(self, request: Request, start: int, end: int) -> Iterator[int]:
        """Boundaries where the policy wants a checkpoint, and that `take` does not reach at the end
        of an append."""
        size = self.layout.block_tokens
        behind = min(self.layout.draft, size - 1)  # a step takes one at its last boundary alone
        boundaries = range((start // size + 1) * size, end - behind, size) if self.on else ()
        return (each for each in boundaries if self.policy.wants(request, each, size))

    def _can_mark(self, start: int, boundary: int) -> bool:
        """Whether a step from `start` on has all tokens that a checkpoint at a boundary needs."""
        return self.layout.can_mark and start <= boundary - (self.layout.window - 1)

    def mark(self, request: Request, start: int, ticket: int) -> tuple[tuple[int, int], ...]:
        """The (boundary, slot) of a checkpoint that an append from `start` to where `request` is
        writes itself, if the policy wants one."""
        boundary = next(self._passed(request, start, request.length), None)
        if boundary is None or not self._can_mark(start, boundary):
            return ()
        slot = self._reserved(request, boundary, True, ticket)
        return () if slot is None else ((boundary, slot),)

    def take(self, request: Request, start: int, ticket: int) -> tuple[Copy, ...]:
        """The copy that makes one, if an append from `start` to where `request` is calls for it."""
        size = self.layout.block_tokens
        boundary = request.length // size * size
        reached = start < boundary and request.furthest - boundary <= self.layout.draft
        if not self.on or not reached:
            return ()
        stays = self.policy.wants(request, boundary, size)
        if not (stays or self.policy.rolling):
            return ()
        slot = self._reserved(request, boundary, stays, ticket)
        if slot is None:
            return ()
        return (Copy(Pool.STATES, Pool.CHECKPOINTS, request.state, slot, boundary),)

    def _reserved(self, request: Request, boundary: int, stays: bool, ticket: int) -> int | None:
        """Return a slot for a checkpoint; None if it is there already, or no slot is free."""
        prefix = self.prefix
        if boundary <= request.known and self._is_there(request, boundary, stays):
            return None
        if not prefix.checkpoints.available:
            prefix.counters.checkpoints_skipped += 1
            return None
        self._roll(request)
        (slot,) = prefix.checkpoints.take(1, request.name)
        request.nameless.append(Nameless(boundary, slot, stays))
        self.settle(request, ticket)
        return slot

    def settle(self, request: Request, ticket: int) -> None:
        """Checkpoints of the request whose tokens are known by now can be found. ticket: of the
        last device work that may touch them."""
        nameless, checkpoints = request.nameless, self.prefix.checkpoints
        while nameless and nameless[0].boundary <= request.known:
            boundary, slot, stays = nameless.popleft()
            if not self._is_there(request, boundary, stays):
                self._roll(request)
                digest = self._digest(request, boundary)
                if not stays:
                    self._rolling[digest], request.rolling = request, digest
                self.prefix.store_checkpoint(slot, digest)
            checkpoints.release([slot], ticket)

    def drop(self, request: Request, ticket: int) -> None:
        """Nobody will know what its last tokens are: what waits for them is of no use."""
        self.prefix.checkpoints.release([each.slot for each in request.nameless], ticket)
        request.nameless.clear()

    def _digest(self, request: Request, boundary: int) -> bytes:
        return request.digests[boundary // self.layout.block_tokens - 1]

    def _is_there(self, request: Request, boundary: int, stays: bool) -> bool:
        """Whether somebody took the one at a boundary before; one that stays, stays from now on."""
        digest = self._digest(request, boundary)
        if stays:
            self.keep(digest)
        return self.prefix.checkpoints.find(digest) is not None

    def keep(self, digest: bytes) -> None:
        """Others rely on this one: it stays when the request that made it goes on."""
        self._rolling.pop(digest, None)

    def leave(self, request: Request) -> bool:
        """The end of a request: its newest checkpoint stays, for its next turn. Whether it has
        one that was not to stay otherwise."""
        rolls = self._rolling.get(request.rolling) is request
        if rolls:
            del self._rolling[request.rolling]
        return rolls

    def _roll(self, request: Request) -> None:
        """The request has a newer one than its newest so far."""
        if self.leave(request):
            self.prefix.forget_checkpoint(request.rolling)
        request.rolling = b""
