"""Requests as the manager keeps them, and token ids as callers give them."""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from kvcache.checks import shown, whole

Tokens = Sequence[int] | np.ndarray

UNKNOWN = -1  # the id of a token that is a placeholder

MAX_TOKEN = (1 << 63) - 1  # digests are of int64
MAX_TOKENS = 1 << 26  # far beyond any model's context
TRUTHS = frozenset({bool, np.bool_})  # which numpy takes for integers where they stand among such


@dataclass(frozen=True)
class Placeholders:
    """`count` tokens, 1 at least, that the device alone knows yet: an engine that does not wait for
    the tokens of a step before it launches the next one says later what they are."""

    count: int = 1

    def __post_init__(self) -> None:
        if whole("count", self.count, None, MAX_TOKENS) < 1:
            raise ValueError(f"{self.count} placeholders: at least 1")


def token_ids(name: str, tokens: Any) -> np.ndarray:
    """Token ids as int64 [n], n at least 1, UNKNOWN for placeholders; TypeError or ValueError for
    anything else."""
    if isinstance(tokens, Placeholders):
        return np.full(tokens.count, UNKNOWN, np.int64)
    if _count(tokens) > MAX_TOKENS:
        raise ValueError(f"{name}: {_count(tokens)} tokens at once, at most {MAX_TOKENS}")
    try:
        ids = np.asarray(tokens)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        what = f"tokens are {shown(tokens)}, expected a 1-D sequence of integers on the host"
        raise TypeError(f"{name}: {what}") from error
    if ids.dtype.kind != "i" or ids.ndim != 1 or not ids.size:
        ids = _from_odd(name, tokens, ids)
    if isinstance(tokens, Sequence) and not TRUTHS.isdisjoint(map(type, tokens)):
        place = next(n for n, token in enumerate(tokens) if type(token) in TRUTHS)
        raise TypeError(f"{name}: token {place} is {tokens[place]!r}, expected an integer")
    return ids.astype(np.int64, copy=False)


def _count(tokens: Any) -> int:
    """Return the number of tokens without expanding a range; 0 if there is no length."""
    try:
        return len(tokens)
    except TypeError:
        return 0
    except OverflowError:  # of a range: beyond an index of Python's
        return sys.maxsize


def _from_odd(name: str, tokens: Any, ids: np.ndarray) -> np.ndarray:
    """Return a row of integers for which numpy chose another dtype than a signed one.

    Refuse anything else, and integers beyond int64. numpy makes objects of integers beyond 64 bits,
    and floats of a row in which some integers are signed and others need 64 bits without a sign.
    """
    if tokens is None or isinstance(tokens, str | bytes):
        raise TypeError(f"{name}: tokens are {shown(tokens)}, expected a 1-D sequence of integers")
    if ids.ndim != 1 or not ids.size:
        raise ValueError(f"{name}: tokens of shape {ids.shape}, expected 1-D with at least one")
    if isinstance(tokens, Sequence) and all(isinstance(each, Integral) for each in tokens):
        ids = np.array([int(each) for each in tokens], object)
    elif ids.dtype.kind not in "iu":
        raise TypeError(f"{name}: tokens of dtype {ids.dtype}, expected integers")
    _require_int64(name, ids)
    return ids


def _require_int64(name: str, ids: np.ndarray) -> None:
    least, most = int(min(ids)), int(max(ids))
    if most > MAX_TOKEN or least < -MAX_TOKEN - 1:
        raise ValueError(
            f"{name}: tokens from {least} to {most}, expected {-MAX_TOKEN - 1} to {MAX_TOKEN} "
            "(int64)"
        )


FIRST_TOKENS = 256  # room of a new request; it doubles


class Nameless(NamedTuple):
    """A checkpoint in `slot`, taken at `boundary`, behind tokens that are not all known. stays: see
    `Policy.wants`."""

    boundary: int
    slot: int
    stays: bool


class Request:
    """A handle: callers read it, the manager writes it.

    name: for messages.
    length: tokens in the cache.
    unknown: number of tokens at the end that are placeholders.
    blocks: slots of the paged pool, in order: block i begins with token i * block_tokens.
    state: its slot in STATES, -1 without.
    floor: position of the last copy of its state; it cannot be taken back below.
    furthest: the furthest position written since.
    digests: of its full blocks, as far as their tokens are known.
    last_boundary: boundary of the prompt where a checkpoint serves a repeated prompt.
    """

    def __init__(self, name: str, salt: bytes, last_boundary: int) -> None:
        self.name, self.salt, self.last_boundary = name, salt, last_boundary
        self.length = self.floor = self.furthest = self.unknown = 0
        self.blocks = array("i")  # int32, as block tables are
        self.digests: list[bytes] = []
        self.state = -1
        self.host_blocks: list[int] = []
        self.host_state = -1
        self.resident, self.freed = True, False
        self.rolling = b""  # digest of its newest checkpoint that is not to stay
        self.nameless: deque[Nameless] = deque()  # checkpoints that wait for their digests
        self._tokens = np.empty(FIRST_TOKENS, np.int64)

    def __repr__(self) -> str:
        return f"Request({self.name!r}, {self.length} tokens)"

    @property
    def tokens(self) -> np.ndarray:
        """Ids of the tokens in the cache, int64 [length], UNKNOWN for placeholders; a view."""
        return self._tokens[: self.length]

    @property
    def known(self) -> int:
        """Tokens in the cache before the first placeholder."""
        return self.length - self.unknown

    def extend(self, tokens: np.ndarray, unknown: bool = False) -> None:
        """More tokens at the end. unknown: they are placeholders."""
        end = self.length + len(tokens)
        if end > len(self._tokens):
            grown = np.empty(max(end, 2 * len(self._tokens)), np.int64)
            grown[: self.length] = self.tokens
            self._tokens = grown
        self._tokens[self.length : end] = tokens
        self.length = end
        self.furthest = max(self.furthest, end)
        self.unknown += len(tokens) * unknown

    def learn(self, tokens: np.ndarray) -> None:
        """Replace the first placeholders by `tokens`."""
        known = self.known
        self._tokens[known : known + len(tokens)] = tokens
        self.unknown -= len(tokens)
