"""How the rows and keys of a config are cut into tiles and blocks: what the host and the device
code of every architecture ask. What an architecture adds stands in its `layout.py`."""

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

DEPTH = 3  # tiles of K and of V in flight that hide the latency of global memory


@dataclass(frozen=True)
class Tiles(ABC):
    """Sizes of one config on one architecture.

    A query tile is what is multiplied by a key tile at a time.
    """

    schedules: ClassVar = SCHEDULES  # what `AttentionConfig.schedule` may be
    has_slices: ClassVar = False  # whether warps share a query tile by `AttentionConfig.slices`

    config: AttentionConfig
    arch: str = ""

    def check_options(self) -> None:
        """Raise NotImplementedError for options that other kernels have, or the GPU lacks."""
        config = self.config
        if config.schedule not in ("", *self.schedules):
            raise NotImplementedError(
                f"schedule {config.schedule!r} on {self.arch}: this kernel has {self.schedules}, "
                "'' chooses"
            )
        if config.slices and not self.has_slices:
            raise NotImplementedError(
                f"slices {config.slices} on {self.arch}: only the kernel of instructions="
                "'mma.sync' has slices, 0 chooses"
            )
        if config.pdl:
            require_pdl(self.arch)

    @abstractmethod
    def check(self) -> None:
        """Raise NotImplementedError or ValueError for what the kernel does not do."""

    @cached_property
    @abstractmethod
    def tile_n(self) -> int:
        """Keys of a tile."""

    @abstractmethod
    def variants(self) -> Iterator[AttentionConfig]:
        """The config with other tiles, of which one may suit a window better."""

    @abstractmethod
    def larger(self) -> AttentionConfig | None:
        """The config with twice as many rows in a block, where that is faster once the blocks fill
        the GPU and are as many of a head as `larger_from`, and the config leaves it open."""

    @cached_property
    def larger_from(self) -> int:
        """See `larger`."""
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
        """The CTAs of a pair hold the same K and V, of which each fetches half of the keys for
        both; otherwise each holds a part of its own."""
        return False

    @cached_property
    def loads_once(self) -> bool:
        """K and V that are one tensor are loaded once (`AttentionConfig.k_is_v`)."""
        return False

    @cached_property
    def halves(self) -> int:
        """CTAs that have parts of one query tile."""
        return 1

    @cached_property
    def box_heads(self) -> int:
        """Query heads whose rows of one token follow each other in a tile: the group, or the most
        that divide it where it has more heads than a tile rows."""
        group = self.config.group
        return next(heads for heads in range(min(group, self.rows), 0, -1) if group % heads == 0)

    @cached_property
    def box_tokens(self) -> int:
        """Tokens of a tile. Row r is head r % box_heads of token r // box_heads."""
        return self.rows // self.box_heads

    @cached_property
    def q_rows(self) -> int:
        """Rows of a tile that are heads of tokens; what is left over holds zeros."""
        return self.box_heads * self.box_tokens

    @cached_property
    def head_parts(self) -> int:
        """Tiles that the heads of one token take, one after the other."""
        return self.config.group // self.box_heads

    @cached_property
    def block_tiles(self) -> int:
        """Query tiles of a block, what a CTA, or a pair, computes at a time; of a pair two halves
        of a tile, which count as one each."""
        return self.q_tiles * self.ctas

    def blocks(self, tokens: int) -> int:
        """Of a head, or of a KV head whose query heads share tiles."""
        tiles = -(-tokens // self.box_tokens) * self.head_parts
        return -(-tiles // self.block_tiles)

    @cached_property
    def key_step(self) -> int:
        """Keys from which a tile may begin are multiples of it: a box of them lies in one page."""
        return gcd(self.tile_n, self.config.page_size) if self.config.page_size else 1

    def box_keys(self, keys: int) -> int:
        """Of the keys of a piece those in one box: what this CTA fetches, and what one page holds
        of it."""
        keys = keys // self.ctas if self.multicast else keys
        return gcd(keys, self.config.page_size) if self.config.page_size else keys

    def panel(self, columns: int, item_bytes: int = 0) -> int:
        """Elements of one line of a panel that divides `columns`: 128, 64 or 32 bytes of elements
        of so many, by default of K and V."""
        line = hw.SMEM_LINE_BYTES // (item_bytes or self.config.io_bytes)
        return next(part for part in (line, line // 2, line // 4) if columns % part == 0)

    @cached_property
    @abstractmethod
    def stages(self) -> tuple[int, int]:
        """(pieces in the K ring, pieces in the V ring)."""

    def grown(self, k: int, v: int, free: int) -> tuple[int, int]:
        """Rings of k and v pieces, deeper by what fits into `free` bytes, but for one whose depth
        is configured: the one that is the shallower in tiles grows first."""
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
        """Columns of O that one product P V makes."""

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
        """Those of them that TMA fetches."""
        return self.q_rows * self.config.head_dim * self.config.q_item_bytes

    @cached_property
    def k_bytes(self) -> int:
        """Bytes of a K piece in this CTA."""
        return self.k_rows * self.k_columns * self.config.io_bytes

    @cached_property
    def v_bytes(self) -> int:
        """Bytes of a V piece in this CTA."""
        return self.tile_n * self.v_columns * self.config.io_bytes
