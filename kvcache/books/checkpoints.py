"""Checkpoints: copies of the state of a request, from which another may begin.

Only at the boundary of a block: there compressors wait for little (DeepSeek-V4: HCA for nothing,
CSA for the half of four rows), and a hit ends at a boundary anyway. A step may end up to `draft`
tokens behind the boundary, since rings keep that much more than the window.
"""

from __future__ import annotations

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

    def room(self, request: Request, wanted: int) -> int:
        """Return how many of `wanted` tokens one append takes without missing a checkpoint."""
        if not self.on:
            return wanted
        size = self.layout.block_tokens
        first = (request.length // size + 1) * size
        behind = min(self.layout.draft, size - 1)  # a step takes one at its last boundary alone
        for boundary in range(first, request.length + wanted - behind, size):
            if self.policy.wants(request, boundary, size):
                return boundary - request.length
        return wanted

    def take(self, request: Request, start: int, ticket: int) -> tuple[Copy, ...]:
        """The copy that makes one, if an append from `start` to where `request` is calls for it."""
        size, prefix = self.layout.block_tokens, self.prefix
        boundary = request.length // size * size
        reached = start < boundary and request.furthest - boundary <= self.layout.draft
        if not self.on or not reached:
            return ()
        stays, known = self.policy.wants(request, boundary, size), boundary <= request.known
        if not (stays or self.policy.rolling):
            return ()
        if known and self._is_there(request, boundary, stays):
            return ()
        if not prefix.checkpoints.available:
            prefix.counters.checkpoints_skipped += 1
            return ()
        self._roll(request)
        (slot,) = prefix.checkpoints.take(1, request.name)
        request.nameless.append(Nameless(boundary, slot, stays))
        self.settle(request, ticket)
        return (Copy(Pool.STATES, Pool.CHECKPOINTS, request.state, slot, boundary),)

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
