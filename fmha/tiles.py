"""Tiles and blocks that the rows and keys of a config are cut into, for host and device code.

Each architecture adds its own parts in its `layout.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import ClassVar

from fmha.config import SCHEDULES, AttentionConfig
from kernelkit.compile.arch import require_pdl
from kernelkit.plan import hw

DEPTH = 3  # tiles of K and of V in flight, enough to hide the latency of global memory


@dataclass(frozen=True)
class Tiles(ABC):
    """Sizes of one config on one architecture.

    A query tile is multiplied by one key tile at a time.
    """

    schedules: ClassVar = SCHEDULES  # allowed values of `AttentionConfig.schedule`
    has_slices: ClassVar = False  # whether warps share a query tile by `AttentionConfig.slices`

    config: AttentionConfig
    arch: str = ""

    def check_options(self) -> None:
        """Raise NotImplementedError for options that this kernel or the GPU does not support."""
        config = self.config
        if config.schedule not in ("", *self.schedules):
            raise NotImplementedError(
                f"schedule {config.schedule!r} on {self.arch}: this kernel has {self.schedules}, "
                "'' for automatic"
            )
        if config.slices and not self.has_slices:
            raise NotImplementedError(
                f"slices {config.slices} on {self.arch}: only the kernel of instructions="
                "'mma.sync' has slices, 0 for automatic"
            )
        if config.pdl:
            require_pdl(self.arch)
        if config.block_keys:
            self._check_blocks()

    def _check_blocks(self) -> None:
        """Raise NotImplementedError for a block mask whose blocks are no multiples of tiles."""
        config, tokens = self.config, self.block_tokens
        tiles = config.block_rows // self.box_tokens * self.head_parts
        if (
            config.block_rows % tokens
            or tiles % self.block_tiles
            or config.block_keys % self.tile_n
        ):
            raise NotImplementedError(
                f"block_mask with blocks of {config.block_rows} x {config.block_keys}: multiples "
                f"of {tokens} queries x {self.tile_n} keys, the tiles of this kernel"
            )

    @abstractmethod
    def check(self) -> None:
        """Raise NotImplementedError or ValueError for configs that the kernel does not support."""

    @cached_property
    @abstractmethod
    def tile_n(self) -> int:
        """Keys of a tile."""

    @abstractmethod
    def variants(self) -> Iterator[AttentionConfig]:
        """Yield the config with other tiles, one of which may suit a window better."""

    @abstractmethod
    def larger(self) -> AttentionConfig | None:
        """Return the config with twice as many rows in a block, or None.

        None if the config fixes the choice, or if larger blocks are never faster. They are used
        once they fill the GPU and a head has at least `larger_from` blocks.
        """

    @cached_property
    def larger_from(self) -> int:
        """Fewest blocks of a head for which `larger` is used."""
        return 2

    @cached_property
    @abstractmethod
    def rows(self) -> int:
        """Query rows of a tile in this CTA; the other CTA of a pair may hold the rest."""

    @cached_property
    @abstractmethod
    def q_tiles(self) -> int:
        """Query tiles that a CTA computes at a time."""

    @cached_property
    def ctas(self) -> int:
        """CTAs that share K and V."""
        return 1

    @cached_property
    def residents(self) -> int:
        """CTAs that an SM holds."""
        return 1

    @cached_property
    def multicast(self) -> bool:
        """Whether both CTAs of a pair hold the same K and V, and each fetches half of the keys for
        both.

        Otherwise each CTA holds its part alone.
        """
        return False

    @cached_property
    def loads_once(self) -> bool:
        """Whether K and V that are one tensor are loaded once (`AttentionConfig.k_is_v`)."""
        return False

    @cached_property
    def halves(self) -> int:
        """Number of CTAs that share one query tile."""
        return 1

    @cached_property
    def box_heads(self) -> int:
        """Number of query heads whose rows of one token are adjacent in a tile.

        The whole group, or its largest divisor that fits if the group has more heads than a tile
        has rows.
        """
        group = self.config.group
        return next(heads for heads in range(min(group, self.rows), 0, -1) if group % heads == 0)

    @cached_property
    def box_tokens(self) -> int:
        """Tokens of a tile. Row r is head r % box_heads of token r // box_heads."""
        return self.rows // self.box_heads

    @cached_property
    def q_rows(self) -> int:
        """Number of rows of a tile that hold heads of tokens; the remaining rows hold zeros."""
        return self.box_heads * self.box_tokens

    @cached_property
    def head_parts(self) -> int:
        """Number of consecutive tiles that hold the heads of one token."""
        return self.config.group // self.box_heads

    @cached_property
    def block_tiles(self) -> int:
        """Number of query tiles of a block, which a CTA or a pair computes at a time.

        Two halves of a tile in a pair count as one tile each.
        """
        return self.q_tiles * self.ctas

    @cached_property
    def block_tokens(self) -> int:
        """Tokens of a block, at least 1."""
        return max(self.box_tokens * self.block_tiles // self.head_parts, 1)

    @cached_property
    def of_mask_block(self) -> int:
        """Number of query blocks in one of a block mask."""
        tiles = self.config.block_rows // self.box_tokens * self.head_parts
        return tiles // self.block_tiles

    def blocks(self, tokens: int) -> int:
        """Number of blocks of a head, or of a KV head whose query heads share tiles."""
        tiles = -(-tokens // self.box_tokens) * self.head_parts
        return -(-tiles // self.block_tiles)

    @cached_property
    def key_step(self) -> int:
        """Alignment of the first key of a tile, so that each box of keys lies in one page."""
        return gcd(self.tile_n, self.config.page_size) if self.config.page_size else 1

    def box_keys(self, keys: int) -> int:
        """Number of keys in one box of a piece of `keys` keys.

        A box has keys that this CTA fetches and that lie in one page.
        """
        keys = keys // self.ctas if self.multicast else keys
        return gcd(keys, self.config.page_size) if self.config.page_size else keys

    def panel(self, columns: int, item_bytes: int = 0) -> int:
        """Return the elements of one line of a panel, a divisor of `columns`: 128, 64 or 32 bytes.

        item_bytes: bytes of an element, by default of K and V.
        """
        line = hw.SMEM_LINE_BYTES // (item_bytes or self.config.io_bytes)
        return next(part for part in (line, line // 2, line // 4) if columns % part == 0)

    @cached_property
    @abstractmethod
    def stages(self) -> tuple[int, int]:
        """Pieces in the rings: (K ring, V ring)."""

    def grown(self, k: int, v: int, free: int) -> tuple[int, int]:
        """Return (k, v) pieces of the rings, deepened by what fits into `free` bytes.

        A ring whose depth is configured keeps it. The ring with fewer tiles grows first.
        """
        config = self.config
        while not (config.k_stages and config.v_stages):
            k_depth, v_depth = k / self.k_pieces, v / self.v_pieces
            grow_k = not config.k_stages and (config.v_stages > 0 or k_depth <= v_depth)
            needed, depth = (self.k_bytes, k_depth) if grow_k else (self.v_bytes, v_depth)
            if needed > free or depth >= DEPTH:
                break
            free -= needed
            k, v = (k + 1, v) if grow_k else (k, v + 1)
        return k, v

    @cached_property
    @abstractmethod
    def k_rows(self) -> int:
        """Keys of a K piece in this CTA."""

    @cached_property
    @abstractmethod
    def k_columns(self) -> int:
        """Columns of a K piece."""

    @cached_property
    def k_pieces(self) -> int:
        """Pieces of a K tile."""
        return self.config.head_dim // self.k_columns

    @cached_property
    @abstractmethod
    def o_tile(self) -> int:
        """Columns of O that one product P V computes."""

    @cached_property
    def v_columns(self) -> int:
        """Columns of a V piece in this CTA."""
        return self.o_tile if self.multicast else self.o_tile // self.ctas

    @cached_property
    def v_pieces(self) -> int:
        """Pieces of a V tile, and of O."""
        return self.config.v_dim // self.o_tile

    @cached_property
    @abstractmethod
    def o_panel(self) -> int:
        """Columns of O in one line of the panels that TMA stores."""

    @cached_property
    def q_bytes(self) -> int:
        """Bytes of one query tile in this CTA."""
        return self.rows * self.config.head_dim * self.config.q_item_bytes

    @cached_property
    def q_box_bytes(self) -> int:
        """Bytes of a query tile that TMA fetches."""
        return self.q_rows * self.config.head_dim * self.config.q_item_bytes

    @cached_property
    def k_bytes(self) -> int:
        """Bytes of a K piece in this CTA."""
        return self.k_rows * self.k_columns * self.config.io_bytes

    @cached_property
    def v_bytes(self) -> int:
        """Bytes of a V piece in this CTA."""
        return self.tile_n * self.v_columns * self.config.io_bytes
