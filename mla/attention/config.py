"""Compile-time config of attention to latent keys, and every limit on its fields.

A config is the key of the compile cache. Entries, tokens, lengths, strides and the scale are not in
it.
"""

from __future__ import annotations

from dataclasses import dataclass

from mla.attention.formats import FORMS, Form

MAX_HEADS = 128
MAX_TOKENS = 64  # of a query entry; each number has a kernel of its own
MAX_CLUSTER = 16
KERNEL_NAMES = ("auto", "warp", "wgmma", "umma")  # of kernels, for users


@dataclass(frozen=True)
class Keys:
    """Source of keys: a cache, and how a query entry names its keys there.

    record: a name of FORMS.
    rows: entries of a page of the cache.
    listed: an array [N, k] names the cache entries (page * rows + row) that a query entry sees;
        negative numbers and those past the cache are no entry. Otherwise a table [N, pages] has
        the pages of its keys 0, 1, 2, ...
    wide_index: the array is int64, not int32.
    counts: an int32 [N] says how many keys there are; otherwise all k are valid.
    """

    record: str
    rows: int
    listed: bool = False
    wide_index: bool = False
    counts: bool = False

    @property
    def form(self) -> Form:
        return FORMS[self.record]


@dataclass(frozen=True)
class Ways:
    """Ways of the Hopper kernel to the same results. `choose.py` knows what was fastest.

    crosses: each of two CTAs with the same keys gathers half of a tile, converts it, and copies it
        to the other one (cp.async.bulk); else each gathers all. For codes; needs 2 sharers.
    resident: clusters that stay, and take one unit after the other: query entries and row tiles. 0
        for a cluster per unit. Needs cluster 1 and no parts.
    halves: codes become fp16, not bf16, see `sm90/halves.py`. Each source has codes for all columns
        of V. Needs slices 1; CTAs do not cross. This way alone changes bits.
    """

    crosses: bool = False
    resident: int = 0
    halves: bool = False


@dataclass(frozen=True)
class LatentConfig:
    """What one kernel is compiled for.

    heads: query heads, which all read the same keys.
    tokens: query tokens of an entry; they are its newest keys if `causal`.
    keys, extra: sources of keys, in one softmax; `extra` has as many columns.
    causal: query token t of T sees no key of later tokens.
    sinks: one logit for each head joins the denominator.
    rope: columns of O, the last ones, that are rotated back by the entry's position; 0 or 64.
    key_scale: an fp32 [1] multiplies keys of a record without scales in e4m3.
    cluster: ranks that share the keys of a row tile, and reduce through distributed shared memory:
        CTAs, or pairs of CTAs on Blackwell.
    sharers: neighbouring row tiles of an entry in a cluster, 1 or 2: tiles of keys are multicast.
    slices: CTAs that compute S of the same rows and keys, each for a slice of the columns of V: 1,
        2 or 4. Their clusters exchange less. Of the Hopper kernel, without sharers.
    parts: several clusters share an entry; the last to arrive merges the results of all.
    pdl: programmatic dependent launch.
    ways: of the Hopper kernel.
    """

    heads: int = 128
    tokens: int = 1
    keys: Keys = Keys("bf16_576", 64, counts=True)
    extra: Keys | None = None
    causal: bool = False
    sinks: bool = False
    rope: int = 0
    key_scale: bool = False
    cluster: int = 1
    sharers: int = 1
    slices: int = 1
    parts: bool = False
    pdl: bool = False
    ways: Ways = Ways()

    @property
    def columns(self) -> int:
        """Columns of Q and K."""
        return self.keys.form.columns

    @property
    def sources(self) -> tuple[Keys, ...]:
        """Sources of keys, in the order of their tiles."""
        return (self.keys,) if self.extra is None else (self.keys, self.extra)
