"""Small caches for the tests of the manager, and the naive model of what they have to hold.

Each has what one kind of model needs, records of a few bytes, blocks of a few tokens, and pools so
small that every one of them runs out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from kvcache.books.checkpoints import Policy
from kvcache.books.slot_pool import Sizes
from kvcache.layouts.layout import Layout, Ring, Stream, Tail
from kvcache.layouts.records import Record

WORD = Record("word", 8)
SCALED = Record("scaled", 12, 4)
ODD = Record("odd", 10, 3)


@dataclass(frozen=True)
class Case:
    """A cache, and how much of it there is."""

    layout: Layout
    sizes: Sizes
    policy: Policy | None = None
    deferred: bool = False

    @property
    def name(self) -> str:
        return self.layout.name + ("-deferred" if self.deferred else "")


SPARSE = Layout(
    "sparse",  # as DeepSeek-V4: two ratios, an overlap, a packed stream, an online tail, drafts
    8,
    (
        Stream("main", SCALED, 2, 2),
        Stream("index", WORD, 2, 1),
        Stream("packed", ODD, 8, 3, packed=True),
    ),
    (Ring("window", ODD, 5, 2),),
    (Tail("overlap", 2, 2, 2, overlap=2), Tail("online", 8, 1, 2, online=True)),
    draft=3,
)
RAW = Layout(
    "raw",  # long tails as they are, wide ones, a window wider than a block, one token of draft
    8,
    (Stream("main", WORD, 4, 1), Stream("far", WORD, 8, 1)),
    (Ring("window", SCALED, 11, 1), Ring("narrow", WORD, 1, 1)),
    (Tail("overlap", 4, 8, 1, overlap=2), Tail("far_tail", 8, 1, 1)),
    draft=1,
)
WINDOW = Layout(
    "window",  # every token has an entry, a ring beside; blocks of 4
    4,
    (Stream("keys", WORD, 1, 1), Stream("values", ODD, 1, 2)),
    (Ring("window", WORD, 6, 1),),
    draft=2,
)
PLAIN = Layout("plain", 4, (Stream("keys", WORD, 1, 1), Stream("values", SCALED, 1, 1)), draft=2)
BLIND = Layout(
    "blind",  # nothing can be taken back
    8,
    (Stream("main", WORD, 2, 1),),
    (Ring("window", WORD, 5, 1),),
    (Tail("tail", 2, 2, 1, overlap=2), Tail("online", 8, 1, 1, online=True)),
)
DRAFTS = Layout(
    "drafts",  # more of them than tokens in a block or in the window
    4,
    (Stream("main", WORD, 1, 1), Stream("pair", ODD, 2, 2, packed=True)),
    (Ring("window", WORD, 3, 1),),
    (Tail("overlap", 4, 8, 1, overlap=2), Tail("online", 2, 1, 1, online=True)),
    draft=6,
)

SMALL = Sizes(blocks=40, states=6, checkpoints=5, host_blocks=14, host_states=2)
STATELESS = Sizes(blocks=40, host_blocks=14)

CASES = {
    case.name: case
    for case in (
        Case(SPARSE, SMALL),
        Case(SPARSE, SMALL, Policy(every=2), deferred=True),
        Case(RAW, SMALL, Policy(every=1, rolling=False)),
        Case(RAW, SMALL, deferred=True),
        Case(WINDOW, SMALL, Policy(every=3, prompt_end=False)),
        Case(WINDOW, SMALL, deferred=True),
        Case(PLAIN, STATELESS),
        Case(PLAIN, STATELESS, deferred=True),
        Case(BLIND, SMALL, Policy(every=1)),
        Case(BLIND, SMALL, Policy(rolling=False), deferred=True),
        Case(DRAFTS, SMALL, Policy(every=2)),
        Case(DRAFTS, SMALL, deferred=True),
    )
}


# What a cache has to hold, without a cache: every request is the list of its tokens.
#
# The true bytes of anything that a token leaves behind are a function of the chain of tokens up to
# it, so a block that is shared wrongly, a row that is stale, a copy that is missing or a state that
# belongs to another request shows as different bytes. There are no pages and no slots here, and
# which rows a request still needs is written once more, independently.

MASK = (1 << 64) - 1
FIRST, STEP, SPREAD = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def record_bytes(array: Stream | Ring | Tail) -> int:
    """Bytes of what one token leaves in one copy of an array; a raw tail: values, then scores."""
    if isinstance(array, Tail):
        return array.row_bytes * (1 if array.online else 2)
    return array.record.bytes


@cache
def _keys(name: str, copies: int, size: int) -> np.ndarray:
    """uint64 [copies, words]: what makes the bytes of one array and copy differ from all others."""
    words = -(-size // 8)
    text = hashlib.shake_128(name.encode()).digest(copies * words * 8)
    return np.frombuffer(text, np.uint64).reshape(copies, words)


def true_bytes(array: Stream | Ring | Tail, chain: np.ndarray) -> np.ndarray:
    """uint8 [len(chain), copies, bytes] of tokens whose chains have these hashes."""
    size = record_bytes(array)
    mixed = (chain[:, None, None] ^ _keys(array.name, array.copies, size)) * np.uint64(STEP)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(SPREAD)
    return mixed.view(np.uint8)[..., :size]


class Past:
    """Some tokens, as the hashes of their beginnings."""

    def __init__(self, hashes: list[int]) -> None:
        self._hashes = hashes  # of the first n tokens

    def __len__(self) -> int:
        return len(self._hashes) - 1

    def chain(self, ends: Iterable[int]) -> np.ndarray:
        """Hashes of the first `end` tokens, for each of `ends`."""
        hashes = self._hashes
        return np.array([hashes[end] for end in ends], np.uint64)

    def followed(self, tokens: Iterable[int]) -> Past:
        """Return this past followed by `tokens`."""
        return Past(_continued(list(self._hashes), tokens))


def _continued(hashes: list[int], tokens: Iterable[int]) -> list[int]:
    last = hashes[-1]
    for token in tokens:
        last = ((last ^ (int(token) + 1)) * STEP + FIRST) & MASK
        last ^= last >> 31
        hashes.append(last)
    return hashes


class History(Past):
    """The tokens of one request, and how far back a cache still has to be able to take it."""

    def __init__(self, salt: bytes = b"", tokens: Sequence[int] = ()) -> None:
        seed = int.from_bytes(hashlib.blake2b(salt, digest_size=8).digest(), "little")
        super().__init__([seed ^ FIRST])
        self.salt = salt
        self.tokens: list[int] = []
        self.floor = self.furthest = 0
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """More tokens at the end."""
        _continued(self._hashes, tokens)
        self.tokens += map(int, tokens)
        self.furthest = max(self.furthest, len(self.tokens))

    def cut(self, length: int) -> None:
        """Keep only the first `length` tokens."""
        del self.tokens[length:], self._hashes[length + 1 :]

    def restored(self) -> None:
        """All that is not needed from here on is gone: the state was copied."""
        self.floor = self.furthest = len(self.tokens)

    def most_back(self, layout: Layout) -> int:
        """Return how many tokens can be rolled back."""
        if not layout.has_state:
            return len(self.tokens)
        return max(0, len(self.tokens) - max(self.floor, self.furthest - layout.draft))


def ends(stream: Stream, length: int) -> range:
    """Ends of the runs of tokens that have an entry in a request of `length` tokens."""
    return range(stream.ratio, length + 1, stream.ratio)


def whole_rows(array: Ring | Tail, length: int) -> range:
    """Return positions whose rows the next token of a request of `length` tokens reads completely.

    For a Ring these are the token and the window - 1 before it. For a Tail they are the incomplete
    window, or the running result of that window if the tail is online.
    """
    if isinstance(array, Ring):
        return range(max(0, length + 1 - array.window), length)
    begun = length // array.ratio * array.ratio
    return range(max(begun, length - 1) if array.online else begun, length)


def half_rows(array: Ring | Tail, length: int) -> range:
    """Positions whose rows it reads the first part of: windows before, of a tail with overlap."""
    if isinstance(array, Ring) or array.overlap == 1:
        return range(0)
    begun = length // array.ratio * array.ratio
    return range(max(0, begun - (array.overlap - 1) * array.ratio), begun)


def half_columns(tail: Tail) -> np.ndarray:
    """Return which bytes of `true_bytes` that part is, of the values and of the scores."""
    part = tail.row_bytes // tail.overlap * (tail.overlap - 1)
    return np.concatenate([np.arange(part), tail.row_bytes + np.arange(part)])


# operation -> how often, of the sum
