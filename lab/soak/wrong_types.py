"""Public calls of a manager or a cache with arguments of a wrong type or out of range, and a
snapshot of all bookkeeping, to check that a refused call changes nothing."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import partial
from typing import Any

import numpy as np

from kvcache.books.checkpoints import Policy
from kvcache.books.manager import Manager
from kvcache.books.requests import Request
from kvcache.books.work import Pool
from kvcache.layouts.layout import Layout

HUGE = 1 << 70
NO_NAMES = (None, 3, 1.5, True, b"x", ["x"], ("x",), {}, np.int64(3))
NO_SALTS = (None, "x", 3, 1.5, [1], bytearray(b"x"), np.zeros(2))
NO_TRUTHS = (None, 1, 0, "yes", 1.0, [], np.bool_(True))
NO_NUMBERS = (None, 1.5, math.nan, math.inf, "1", b"1", True, [1], (), {}, 1j, np.float32(1))
NO_TOKENS = (
    *(None, 1, 1.5, "abc", b"abc", [], (), {}, {1: 2}, {1, 2}, [1.5], [None], ["a"], [[1]]),
    *([1, [2]], [True], [1, True], (2, np.bool_(False)), [HUGE], [1, -HUGE], [1 << 63]),
    *(np.ones(3), np.zeros((1, 3), np.int64)),
    *(np.array(["1"]), np.array([1 << 63], np.uint64), object(), iter([1])),
)
NO_REQUESTS = (None, 0, -1, True, "name", b"name", 1.5, [], (), {}, object(), Request)
NO_WORKS = (None, 0, "step", [], {}, object(), Request("stranger", b"", 0))
NO_POOLS = (None, 0, "blocks", Pool, [])
NO_SLOTS = (None, 1, "12", b"12", {1: 2}, [None], [1.0], [True], [-1], [0, 1 << 40], [HUGE])
NO_BATCHES = (None, 1, "x", [1], ((1, 2),), {1})

Call = tuple[str, Callable[[], object]]


def wrong_calls(target: Any, request: Request | None) -> Iterator[Call]:
    """(what it is, a call to be refused) for all that a manager and a cache have in common.

    request: one that is live and on the device; None where there is none.
    """
    for value in NO_NAMES:
        yield _call(target, "admit", value, [1])
    for value in NO_TOKENS:
        yield _call(target, "admit", "late", value)
    for value in NO_SALTS:
        for use_cache in (True, False):
            yield _call(target, "admit", "late", [1, 2], salt=value, use_cache=use_cache)
    for value in NO_TRUTHS:
        yield _call(target, "admit", "late", [1, 2], use_cache=value)
    for name in ("free", "preempt", "offload", "fetch"):
        for value in NO_REQUESTS:
            yield _call(target, name, value)
    for value in NO_REQUESTS:
        yield _call(target, "fork", value, "late")
        yield _call(target, "rollback", value, 0)
    if request is not None:
        for value in NO_NAMES:
            yield _call(target, "fork", request, value)
        for value in (*NO_NUMBERS, -1, -HUGE):
            yield _call(target, "rollback", request, value)


def wrong_batches(append: Callable[[Any], object], request: Request | None) -> Iterator[Call]:
    """Yield wrong calls of a function that appends the next tokens of some requests."""
    for value in NO_BATCHES:
        yield f"append({value!r})", partial(append, value)
    for value in NO_REQUESTS:
        if isinstance(value, list | dict):
            continue  # no keys
        batch = {value: [1]} if request is None else {request: [1], value: [1]}
        yield f"append({batch!r})", partial(append, batch)
    for value in NO_TOKENS if request is not None else ():
        yield f"append(request: {value!r})", partial(append, {request: value})


def wrong_books(manager: Manager, request: Request | None) -> Iterator[Call]:
    """Yield wrong calls of methods that only a manager has."""
    for value in NO_WORKS:
        yield _call(manager, "abandon", value)
        yield _call(manager, "issued", value)
    for name in ("discard", "readers"):
        for value in NO_POOLS:
            yield _call(manager, name, value, [1])
        for value in NO_SLOTS:
            yield _call(manager, name, Pool.BLOCKS, value)
    for value in NO_REQUESTS:
        yield _call(manager, "room", value, 1)
    for value in (*NO_NUMBERS, -1) if request is not None else ():
        yield _call(manager, "room", request, value)


def books_of(value: Any) -> Any:
    """All that an object holds, to be compared; what never changes is left out."""
    return _frozen(value, {})


def _call(target: Any, name: str, *arguments: Any, **options: Any) -> Call:
    words = [*map(repr, arguments), *(f"{key}={value!r}" for key, value in options.items())]
    return f"{name}({', '.join(words)})", partial(getattr(target, name), *arguments, **options)


def _frozen(value: Any, seen: dict[int, int]) -> Any:
    if value is None or isinstance(value, bool | int | float | str | bytes | Enum):
        return value
    if isinstance(value, Layout | Policy | type) or callable(value):
        return type(value).__name__
    if id(value) in seen:
        return "seen", seen[id(value)]
    seen[id(value)] = len(seen)
    if isinstance(value, np.ndarray | array):
        return value.tobytes()
    if isinstance(value, Mapping):
        return [(_frozen(key, seen), _frozen(item, seen)) for key, item in value.items()]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, list | tuple | deque):
        return [_frozen(item, seen) for item in value]
    return type(value).__name__, _frozen(vars(value), seen)
