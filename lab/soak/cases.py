"""Small caches for the tests of the manager: records of a few bytes, blocks of a few tokens.

Each has what one kind of model needs, and pools so small that every one of them runs out.
"""

from __future__ import annotations

from dataclasses import dataclass

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
