"""Tiles of query rows and shares of keys, as numbers. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from mla.attention.config import LatentConfig


@dataclass(frozen=True)
class RowTiles:
    """Division of the (token, head) rows of an entry into tiles of at most `most` rows.

    A tile has `heads` heads of `tokens` neighbouring tokens; row r is head r % heads of token
    r // heads. Tiles of one token are adjacent.
    """

    heads: int
    tokens: int
    head_tiles: int
    token_tiles: int

    @property
    def rows(self) -> int:
        """Rows of a tile that have a head."""
        return self.heads * self.tokens

    @property
    def count(self) -> int:
        """Tiles of an entry."""
        return self.head_tiles * self.token_tiles


def row_tiles(config: LatentConfig, most: int, least: int = 1) -> RowTiles:
    """Return the division of the config's rows. least: tiles that the heads of a token have."""
    head_tiles = max(-(-config.heads // most), least)
    heads = -(-config.heads // head_tiles)
    tokens = max(1, min(config.tokens, most // heads)) if head_tiles == least else 1
    return RowTiles(heads, tokens, head_tiles, -(-config.tokens // tokens))
