"""Errors of a cache. After any of these the cache is as it was before the call."""

from __future__ import annotations


class CacheError(RuntimeError):
    """The family; arguments beside a message are attributes, and ours to act on."""


class PoolExhausted(CacheError):
    """A pool has fewer free slots than a request needs.

    held: slots that are free but for device work that is not over (see `Manager.issued`).
    """

    def __init__(self, pool: str, request: str, needed: int, available: int, held: int) -> None:
        self.pool, self.request = pool, request
        self.needed, self.available, self.held = needed, available, held
        waiting = f", {held} more wait for device work in flight" if held else ""
        super().__init__(
            f"request {request!r} needs {needed} of {pool}, {available} are free{waiting}"
        )


class HostTierFull(PoolExhausted):
    """A pool in host memory has too few free slots."""


class DoubleFree(CacheError):
    """A request or slot that was freed before is used once more."""


class NotResident(CacheError):
    """The request is in the host tier; fetch it first."""


class StepOpen(CacheError):
    """A step is begun and not finished, or finished and not begun."""


class RollbackPastRing(CacheError):
    """The tokens that should come back have been overwritten, or never were here.

    asked, limit: tokens.
    """

    def __init__(self, request: str, asked: int, limit: int) -> None:
        self.request, self.asked, self.limit = request, asked, limit
        super().__init__(f"request {request!r}: cannot take back {asked} tokens, at most {limit}")


class TokensUnknown(CacheError):
    """The request has placeholders, and the call needs to know what its tokens are.

    unknown: so many; `resolve` says what they are.
    """

    def __init__(self, request: str, unknown: int) -> None:
        self.request, self.unknown = request, unknown
        super().__init__(f"request {request!r}: {unknown} placeholders must be resolved first")


class CorruptedBlock(CacheError):
    """A slot's guard or checksum is not what was written.

    pool, slots: location of the damage.
    requests: names of the requests that read the slots.
    """

    def __init__(self, pool: str, slots: list[int], requests: list[str], what: str) -> None:
        self.pool, self.slots, self.requests = pool, slots, requests
        readers = f", read by {requests}" if requests else ", read by nobody"
        super().__init__(f"{what} of {pool} {slots} differs from what was written{readers}")


class InvariantBroken(CacheError):
    """`check` found the manager's own books wrong: a bug of this library."""
