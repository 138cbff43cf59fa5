"""A request as the manager keeps it: its tokens, its slots, how far back it can go."""

from __future__ import annotations

from array import array
from collections import deque
from typing import NamedTuple

import numpy as np

FIRST_TOKENS = 256  # room of a new request; it doubles


class Nameless(NamedTuple):
    """A checkpoint in `slot`, taken at `boundary`, behind tokens that are not all known. stays: see
    `Policy.wants`."""

    boundary: int
    slot: int
    stays: bool


class Request:
    """A handle: callers read it, the manager writes it.

    name: for messages. length: tokens in the cache; unknown: those of them, at the end, that are
    placeholders. blocks: of the paged pool, in order, block i for tokens i * block_tokens and those
    behind. state: its slot in STATES, -1 without. floor: it cannot be taken back below this
    position, where its state was copied. furthest: the furthest that it ever wrote since. digests:
    of its full blocks, as far as their tokens are known. last_boundary: of the prompt, where a
    checkpoint serves whoever asks the same again.
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
        """What the first placeholders are."""
        known = self.known
        self._tokens[known : known + len(tokens)] = tokens
        self.unknown -= len(tokens)
