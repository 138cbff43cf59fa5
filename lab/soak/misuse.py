"""Calls that cannot be served: a named exception with request and limit, and nothing changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvcache.books.errors import (
    CacheError,
    DoubleFree,
    NotResident,
    PoolExhausted,
    RollbackPastRing,
    TokensUnknown,
)
from kvcache.books.requests import Request
from lab.soak.ledger import require
from lab.soak.wrong_types import Call, books_of, wrong_batches, wrong_books, wrong_calls

if TYPE_CHECKING:
    from lab.soak.driver import Driver, Live


class Misuse:
    """Wrong calls on the manager of a driver; its methods are what can be wrong."""

    def __init__(self, driver: Driver) -> None:
        self.driver, self.manager, self.layout = driver, driver.manager, driver.layout

    def run(self, kind: int, which: int, more: int) -> None:
        """The wrong call that the numbers name, where it can be made."""
        kinds: tuple[Callable[[int, int], None], ...] = (
            self._freed_handle,
            self._not_resident,
            self._rollback_past,
            self._too_much,
            self._foreign_handle,
            self._nonsense,
            self._wrong_type,
        )
        kinds[kind % len(kinds)](which, more)

    def _freed_handle(self, which: int, more: int) -> None:
        self._wrong_handle(self.driver.gone, which, more % 7, DoubleFree)

    def _not_resident(self, which: int, more: int) -> None:
        away = [live for live in self.driver.live if not live.request.resident]
        self._wrong_handle(away, which, more % 4, NotResident)

    def _wrong_handle(
        self, lives: Sequence[Live], which: int, call: int, expected: type[Exception]
    ) -> None:
        if lives:
            request = lives[which % len(lives)].request
            error = self._refused(self._calls(request)[call], expected)
            require(request.name in str(error), f"no name in {error}")

    def unknown_tokens(self, request: Request, which: int) -> None:
        """A call that needs to know a request's placeholders, or resolves more than there are."""
        unknown, calls = request.unknown, self._calls(request)
        needing = [calls[call] for call in (0, 1, 2, 3, 5)]
        error = self._refused(needing[which % len(needing)], TokensUnknown)
        require((error.request, error.unknown) == (request.name, unknown), f"{error}: {unknown}")
        self._refused(lambda: self.manager.resolve(request, [0] * (unknown + 1)), ValueError)

    def _rollback_past(self, which: int, more: int) -> None:
        live = self.driver.choose(which)
        if live is not None and live.request.resident:
            limit = live.history.most_back(self.layout)
            asked = limit + 1 + more % 5
            error = self._refused(
                lambda: self.manager.rollback(live.request, asked), RollbackPastRing
            )
            require((error.asked, error.limit) == (asked, limit), f"{error}: limit {limit}")
            for part in (live.request.name, str(asked), str(limit)):
                require(part in str(error), f"no {part} in {error}")

    def _too_much(self, which: int, more: int) -> None:
        """More tokens than all blocks hold, beside a request that could be served."""
        resident = [live for live in self.driver.live if live.request.resident]
        if resident:
            huge = (self.driver.case.sizes.blocks + 1) * self.layout.block_tokens
            greedy = resident[which % len(resident)]
            batch = {live.request: [1] for live in resident[: more % 3]}
            batch[greedy.request] = [0] * huge
            error = self._refused(lambda: self.manager.append(batch), PoolExhausted)
            require(error.request in [request.name for request in batch], f"{error}: not of them")
            for part in (error.request, str(error.needed), str(error.available)):
                require(part in str(error), f"no {part} in {error}")

    def _foreign_handle(self, which: int, more: int) -> None:
        stranger = Request("stranger", b"", 0)
        self._refused(self._calls(stranger)[more % 7], (ValueError, CacheError))

    def _nonsense(self, which: int, more: int) -> None:
        manager, live = self.manager, self.driver.choose(which)
        calls = [lambda: manager.admit("empty", []), lambda: manager.admit("text", ["a"])]
        if live is not None and live.request.resident:
            request = live.request
            calls += [
                lambda: manager.append({request: []}),
                lambda: manager.append({request: [0.5]}),
                lambda: manager.append({request: [[1], [2]]}),
                lambda: manager.rollback(request, -1),
                lambda: manager.fetch(request),
            ]
        self._refused(calls[more % len(calls)], (ValueError, TypeError))

    def _wrong_type(self, which: int, more: int) -> None:
        """One of all calls with arguments of a wrong type."""
        live = self.driver.choose(which)
        resident = live is not None and live.request.resident
        calls = self.wrong_calls(live.request if live is not None and resident else None)
        self.refused_at_once(*calls[(which * 128 + more) % len(calls)])

    def wrong_calls(self, request: Request | None) -> list[Call]:
        """All of them; request: a live one on the device."""
        manager = self.manager
        return [
            *wrong_calls(manager, request),
            *wrong_batches(manager.append, request),
            *wrong_books(manager, request),
        ]

    def refused_at_once(self, what: str, call: Callable[[], object]) -> None:
        """Before anything is looked at that may change: all books are as they were."""
        before = books_of(self.manager)
        try:
            call()
        except (TypeError, ValueError) as error:
            require(books_of(self.manager) == before, f"{what}: changed by {error!r}")
            self.driver.counts[f"refused: {type(error).__name__}"] += 1
            return
        raise AssertionError(f"{what}: not refused")

    def _calls(self, request: Request) -> list[Callable[[], object]]:
        manager = self.manager
        return [
            lambda: manager.append({request: [1, 2]}),
            lambda: manager.rollback(request, 0),
            lambda: manager.fork(request, "twin"),
            lambda: manager.offload(request),
            lambda: manager.free(request),
            lambda: manager.preempt(request),
            lambda: manager.fetch(request),
        ]

    def _refused(self, call: Callable[[], object], expected: type | tuple[type, ...]) -> Any:
        self.driver.ledger.replay()
        before = self.driver.ledger.snapshot(self.driver.live)
        try:
            call()
        except expected as error:
            require(
                self.driver.ledger.snapshot(self.driver.live) == before, f"changed by {error!r}"
            )
            self.driver.counts[f"refused: {type(error).__name__}"] += 1
            return error
        raise AssertionError(f"not refused with {expected}")
