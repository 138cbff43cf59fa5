"""Tiles of keys that a CTA processes, on the host; `shared/split.py` computes the same in a kernel.

The keys that any query token sees are [0, sink_tokens) and [begin, n_keys). They are cut into
tiles, those of the first range before those of the second, none twice. The tiles are dealt to the
CTAs in order: contiguous shares, the remainder to the low ranks.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reach:
    """Tiles that hold visible keys: [0, sink_tiles) and [first, last)."""

    sink_tiles: int
    first: int
    last: int

    @property
    def tiles(self) -> int:
        """Number of tiles."""
        return self.sink_tiles + self.last - self.first

    def tile(self, index: int) -> int:
        """Return the number of the index-th tile."""
        return index if index < self.sink_tiles else index - self.sink_tiles + self.first


def reach(
    n_keys: int,
    q_tokens: int,
    tile: int,
    left: int | None = None,
    sink_tokens: int = 0,
    first_key: int = 0,
) -> Reach:
    """Return the tiles of `tile` keys that the query tokens of one entry see.

    The tokens are the newest of n_keys. Each sees `left` keys before its position, None for all,
    and the first sink_tokens. No token sees a key before first_key.
    """
    begin = max(first_key, 0 if left is None else n_keys - q_tokens - left)
    last = -(-n_keys // tile)
    first = begin // tile if begin < n_keys else last
    sink_tiles = min(-(-min(sink_tokens, n_keys) // tile), first)
    return Reach(sink_tiles, min(first, last), last)


def share(tiles: int, ctas: int, rank: int) -> tuple[int, int]:
    """Return (first, number) of the tiles of CTA `rank` of `ctas`."""
    base, more = divmod(tiles, ctas)
    return rank * base + min(rank, more), base + (rank < more)


def active(tiles: int, ctas: int) -> int:
    """Return the number of CTAs that have any tile, which are the first ones."""
    return min(tiles, ctas)
