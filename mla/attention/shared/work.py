"""Work of a CTA: which query rows, and which tiles of keys (device code).

A unit is the work of a cluster. CTAs are numbered by entry, row tile or pair of them, slice,
cluster, and rank. The tiles of keys that a row tile sees are divided in order: contiguous shares,
the remainder to the low ranks.
"""

from dataclasses import dataclass
from typing import Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from mla.attention.config import Keys, LatentConfig
from mla.attention.kernel_arguments import KernelArguments, Source
from mla.attention.tiles import RowTiles


class SharingPlan(Protocol):
    """What the division of work needs of a kernel's plan.

    keys: of a tile.
    sharers: neighbouring row tiles whose CTAs have the same tiles of keys.
    most_rows: rows of a tile that there is space for.
    """

    @property
    def config(self) -> LatentConfig: ...
    @property
    def tiles(self) -> RowTiles: ...
    @property
    def keys(self) -> int: ...
    @property
    def sharers(self) -> int: ...
    @property
    def most_rows(self) -> int: ...


@dataclass(frozen=True)
class Work:
    """Query rows and keys of a CTA.

    Tiles of keys are numbered over the sources, those of `extra` after those of `keys`.
    """

    entry: Int32
    tile: Int32  # of the entry's rows
    token: Int32  # first token of the tile
    head: Int32  # first head of the tile
    keys: Int32  # keys of the first source that any row of the entry sees
    extra: Int32  # keys of the second source
    own_tiles: Int32  # tiles of the first source that a row of this tile sees
    begin: Int32  # first tile of this CTA
    count: Int32  # its tiles
    active: Int32  # CTAs of all clusters that have tiles
    part: Int32  # cluster
    rank: Int32  # among the CTAs of the cluster that share the row tile
    sharer: Int32  # which of the neighbouring row tiles
    slice: Int32  # which slice of the columns of V


class HasWork(Protocol):
    """Scope of a role: the arguments and the work of its CTA."""

    @property
    def given(self) -> KernelArguments: ...
    @property
    def work(self) -> Work: ...


@dataclass(frozen=True)
class Row:
    """A query row.

    real: whether the row has a token and a head.
    end: keys of the first source before it are visible.
    """

    token: Int32
    head: Int32
    real: Boolean
    end: Int32


@cute.jit
def locate(plan: SharingPlan, given: KernelArguments, place: Int32) -> Work:
    """Return the work of CTA number `place` of all units."""
    config, tiles = plan.config, plan.tiles
    sharers, groups = plan.sharers, tiles.count // plan.sharers
    each = given.parts * (config.cluster * sharers)  # CTAs of row tiles that share keys
    number, group = place % each, place // each
    slice, group = group % config.slices, group // config.slices
    cta, ctas, sharer = number // sharers, each // sharers, number % sharers
    tile, entry = group % groups * sharers + sharer, group // groups
    token = tile // tiles.head_tiles * tiles.tokens
    head = tile % tiles.head_tiles * tiles.heads
    keys, extra = keys_of(config.keys, given.keys, entry), Int32(0)
    seen = keys
    if cutlass.const_expr(config.causal and config.tokens > 1):
        # All row tiles of a cluster take the tiles that any of their rows sees.
        ahead = (sharers - 1 - sharer + tile % tiles.head_tiles) // tiles.head_tiles + 1
        last = cutlass.min(token + tiles.tokens * ahead, config.tokens) - 1
        seen = cutlass.max(keys - (config.tokens - 1 - last), 0)
    own_tiles = (seen + plan.keys - 1) // plan.keys
    all_tiles = own_tiles
    if cutlass.const_expr(config.extra is not None):
        extra = keys_of(config.extra, given.extra, entry)
        all_tiles += (extra + plan.keys - 1) // plan.keys
    base = all_tiles // ctas
    more = all_tiles - base * ctas
    return Work(
        entry=entry,
        tile=tile,
        token=token,
        head=head,
        keys=keys,
        extra=extra,
        own_tiles=own_tiles,
        begin=cta * base + cutlass.min(cta, more),
        count=base + Int32(cta < more),
        active=cutlass.min(all_tiles, ctas),
        part=cta // config.cluster,
        rank=cta % config.cluster,
        sharer=sharer,
        slice=slice,
    )


@cute.jit
def keys_of(keys: Keys, source: Source, entry: Int32) -> Int32:
    """Return the number of keys of an entry, within those that its row of places can name."""
    most = Int32(source.places.shape[1])
    if cutlass.const_expr(not keys.listed):
        most = most * keys.rows
    if cutlass.const_expr(keys.counts):
        most = cutlass.min(cutlass.max(source.counts[entry], 0), most)
    return most


@cute.jit
def count_of_first(work: Work) -> Int32:
    """Return how many of the CTA's tiles are of the first source; they come first."""
    return cutlass.min(cutlass.max(work.own_tiles - work.begin, 0), work.count)


@cute.jit
def row_of(plan: SharingPlan, work: Work, row: Int32) -> Row:
    """Return a row of the CTA's tile."""
    config, tiles = plan.config, plan.tiles
    token, head = work.token + row // tiles.heads, work.head + row % tiles.heads
    real = token < config.tokens and head < config.heads
    if cutlass.const_expr(tiles.rows < plan.most_rows):
        real = real and row < tiles.rows
    end = work.keys
    if cutlass.const_expr(config.causal and config.tokens > 1):
        end = end - cutlass.max(config.tokens - 1 - token, 0)
    return Row(token, head, real, end)
