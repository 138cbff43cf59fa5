"""AttentionConfig -> tiles and their places in shared memory, on Hopper.

A query tile is 64 rows, which one warpgroup multiplies by a tile of keys; S, P and O stay in its
registers. A block is two or three query tiles, for all of which K and V are loaded once. If the O
of 64 rows exceeds a warpgroup's registers, two warpgroups share a query tile. They process its key
tiles alternately, each computes O for half of the columns, and P goes to the other through shared
memory. Tiles of K and V are then split by columns into as many pieces. Tiles lie in shared memory
as panels: all rows, at most 128 bytes of each, swizzled inside every line.

Products in e4m3 need both operands K-major, so V is transposed: its tiles are copied to tiles of
[column, key]. And their sums keep 13 bits below the largest term, so P V is added to O in fp32
tile by tile, some columns at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from fmha.config import AttentionConfig, check_pages_by_tma
from fmha.tiles import DEPTH, Tiles
from kernelkit.plan import hw
from kernelkit.plan.dtypes import ITEM_BYTES
from kernelkit.plan.smem import SmemBuffer, SmemPlan

ROWS = 64  # M of wgmma
WIDTHS = range(32, 193, 16)  # keys of a tile
STATISTICS = 2  # numbers of a row that sharing warpgroups publish: a maximum and a sum
VT_STAGES = 2  # a tile of V is transposed while the previous one is multiplied
# Registers of a thread by number of computing warpgroups: (computing, loading).
REGISTERS = {1: (240, 40), 2: (240, 24), 3: (160, 32)}
FP8_REGISTERS = {2: (232, 40), 3: (160, 32)}  # the loading one transposes V
OTHER_REGISTERS, FP8_OTHER_REGISTERS = 28, 24  # registers of the loop besides S, P and O
MISC_BYTES = 1024  # barriers, before the first aligned buffer


@dataclass(frozen=True)
class Shape:
    """Tile sizes and options tuned for a head dim.

    polynomial: number of pairs of exponentials, out of 16, computed without the MUFU.
    early: sixteenths of a tile that are exponentiated before the wait for P V of the previous tile.
    sharers: warpgroups of a query tile.
    pairs: blocks of a head from which multicast CTA pairs are faster, (without, with) a right edge,
        0 for never. Pairs cost some cycles, and save the power of moving K and V twice.
    packed: `pairs` for heads that share tiles. A tile then has one token or a few, so neighbours
        see
        the same keys with any mask.
    alone_n: tile_n of single CTAs with a right edge, much of whose last tile is masked; 0 for
        tile_n.
    o_part: FP8 only (its accumulator keeps 13 bits): columns of O per product P V, which is added
        to O.
    products: FP8 only: products P V in flight.
    over_s: FP8 only: how many of these reuse registers of S, if a tile has as many keys.
    before_s: FP8 only: how many are added before S of the next tile is issued. If all are added
        before, and none reuses S, then P reuses the registers of S.
    """

    q_tiles: int
    tile_n: int
    schedule: str
    polynomial: int = 0
    early: int = 8
    sharers: int = 1
    pairs: tuple[int, int] = (0, 0)
    packed: tuple[int, int] = (0, 0)
    alone_n: int = 0
    o_part: int = 0
    products: int = 0
    over_s: int = 0
    before_s: int = 0


SHAPES = {
    64: Shape(3, 128, "pingpong", early=0, pairs=(0, 2)),
    96: Shape(2, 128, "pingpong"),
    128: Shape(2, 128, "pingpong"),
    192: Shape(2, 112, "pingpong", pairs=(2, 64)),
    256: Shape(2, 80, "base", pairs=(32, 64), alone_n=64),
    512: Shape(1, 64, "base", sharers=2, pairs=(2, 8)),
}
FP8_SHAPES = {
    64: Shape(3, 128, "pingpong", o_part=64, products=1, before_s=1),
    96: Shape(3, 128, "pingpong", o_part=96, products=1, over_s=1, before_s=1),
    128: Shape(2, 128, "pingpong", o_part=128, products=1),
    192: Shape(2, 128, "pingpong", o_part=128, products=1),
    256: Shape(2, 128, "base", o_part=128, products=1, over_s=1, before_s=2),
}
# FP8 with fewer keys in a tile: for a narrow window, and for a query of two terms, beside which
# registers hold no wider tile.
NARROW_SHAPES = {256: Shape(2, 64, "pingpong", o_part=64, products=2, over_s=1, before_s=3)}


@dataclass(frozen=True)
class Layout(Tiles):
    """Sizes and places of one config."""

    @cached_property
    def shape(self) -> Shape:
        """Shape tuned for the head dim."""
        return self._shape_of(self.config.tile_n)

    def _shape_of(self, keys: int) -> Shape:
        """Shape for tiles of `keys` keys, 0 for the tuned width."""
        config = self.config
        if not config.is_fp8:
            return SHAPES[config.head_dim]
        tuned = (SHAPES | FP8_SHAPES)[config.head_dim]
        narrow = config.q_terms > 1 or 0 < keys < tuned.tile_n
        return NARROW_SHAPES.get(config.head_dim, tuned) if narrow else tuned

    @cached_property
    def registers(self) -> dict[int, tuple[int, int]]:
        """Registers of a thread by number of computing warpgroups: (computing, loading)."""
        return FP8_REGISTERS if self.config.is_fp8 else REGISTERS

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Widths of a key tile for which registers hold S, P, O, and the products to be
        added to O.
        """
        config = self.config
        other = FP8_OTHER_REGISTERS if config.is_fp8 else OTHER_REGISTERS
        free = self.registers.get(self.teams, (0,))[0] - other - self.o_columns // 2
        step = ROWS if self.sharers > 1 or config.is_fp8 else 1  # P or transposed V: whole panels
        return tuple(
            keys
            for keys in WIDTHS
            if keys % step == 0 and self._registers_of(keys, self._shape_of(keys)) <= free
        )

    def _registers_of(self, keys: int, shape: Shape) -> int:
        """Registers of a thread for S, P, and products that are to be added to O."""
        part = shape.o_part or self.o_columns
        all_before = shape.before_s == self.o_columns // part
        p_over_s = self.config.is_fp8 and not shape.over_s and all_before
        # Of an element of S, and of P if separate.
        bits = 32 + (0 if p_over_s else 8 * self.config.io_bytes)
        apart = shape.products - (shape.over_s if keys >= shape.over_s * shape.o_part else 0)
        return keys * bits // 64 + apart * part // 2

    def apart(self, keys: int) -> int:
        """Number of products P V in flight with separate registers, for tiles of `keys` keys."""
        shape = self.shape
        return shape.products - (shape.over_s if keys >= shape.over_s * shape.o_part else 0)

    def variants(self) -> Iterator[AttentionConfig]:
        """Yield the config with all heights of a block and widths of a key tile that fit."""
        heights = (2 * ROWS, 3 * ROWS) if self.sharers == 1 else (ROWS,)
        for tile_m in (self.config.tile_m,) if self.config.tile_m else heights:
            tall = replace(self.config, tile_m=tile_m)
            for keys in Layout(tall).widths:
                wide = replace(tall, tile_n=keys)
                if Layout(wide).least_bytes <= hw.SMEM_BYTES_PER_CTA:
                    yield wide

    def larger(self) -> AttentionConfig | None:
        config = self.config
        apart = config.group == 1 and (config.left or config.varlen_q or config.page_size)
        pays = self.larger_from and not apart and not config.ctas
        return replace(config, ctas=2) if pays else None

    @cached_property
    def larger_from(self) -> int:
        shape = self.shape
        return (shape.pairs if self.config.group == 1 else shape.packed)[self.config.right]

    @cached_property
    def tile_n(self) -> int:
        """Keys of a tile."""
        alone = self.config.right and not self.multicast
        return self.config.tile_n or (alone and self.shape.alone_n) or self.shape.tile_n

    @cached_property
    def rows(self) -> int:
        return ROWS

    @cached_property
    def q_tiles(self) -> int:
        return self.config.tile_m // ROWS or self.shape.q_tiles

    @cached_property
    def sharers(self) -> int:
        """Warpgroups that share a query tile."""
        return self.shape.sharers

    @cached_property
    def teams(self) -> int:
        """Number of computing warpgroups."""
        return self.q_tiles * self.sharers

    @cached_property
    def ctas(self) -> int:
        return self.config.ctas or 1

    @cached_property
    def multicast(self) -> bool:
        return self.ctas > 1

    @cached_property
    def loads_once(self) -> bool:
        """Whether K and V that are one tensor are loaded once.

        True if the rings would otherwise be one tile deep and their depth is not configured.
        """
        config = self.config
        return self.sharers > 1 and not (config.is_fp8 or config.k_stages or config.v_stages)

    @cached_property
    def ordered(self) -> bool:
        """Whether warpgroups issue their products in ping-pong order, always if they share a query
        tile.

        The softmax of one then overlaps the products of others.
        """
        return self.sharers > 1 or (self.config.schedule or self.shape.schedule) == "pingpong"

    @cached_property
    def exp2_share(self) -> int:
        """Number of pairs of exponentials, out of 16, computed by a polynomial."""
        config = self.config
        return config.polynomial if config.polynomial >= 0 else self.shape.polynomial

    @cached_property
    def k_rows(self) -> int:
        return self.tile_n

    @cached_property
    def k_columns(self) -> int:
        return self.config.head_dim // self.sharers

    @cached_property
    def v_bytes(self) -> int:
        return 0 if self.config.k_is_v else super().v_bytes

    @cached_property
    def o_tile(self) -> int:
        return self.o_columns

    @cached_property
    def o_columns(self) -> int:
        """Columns of O that one warpgroup computes."""
        return self.config.v_dim // self.sharers

    @cached_property
    def o_part(self) -> int:
        """Columns of O that one product P V computes."""
        return self.shape.o_part or self.o_columns

    @cached_property
    def o_parts(self) -> int:
        """Products P V of a tile."""
        return self.o_columns // self.o_part

    @cached_property
    def vt_bytes(self) -> int:
        """Bytes of a transposed tile of V, 0 if V is multiplied as it is."""
        return self.v_bytes if self.config.is_fp8 else 0

    @cached_property
    def p_bytes(self) -> int:
        """Bytes of the P of one key tile in shared memory."""
        return self.rows * self.tile_n * self.config.io_bytes if self.sharers > 1 else 0

    @cached_property
    def statistics_bytes(self) -> int:
        """Bytes in which the warpgroups of a query tile publish one number of each row."""
        return self.sharers * self.rows * ITEM_BYTES["fp32"] if self.sharers > 1 else 0

    @cached_property
    def o_panel(self) -> int:
        return self.panel(self.config.v_dim, self.config.out_bytes)

    @cached_property
    def o_in_smem(self) -> bool:
        """Whether O is stored by TMA from shared memory, if it fits there.

        In fp32 and e4m3 four lanes write whole sectors of global memory, so TMA gains nothing.
        """
        narrow = self.config.out_bytes == ITEM_BYTES["bf16"]
        return narrow and self._free >= self.q_tiles * self._bytes_of_o

    @cached_property
    def _bytes_of_o(self) -> int:
        """Bytes of O of one query tile."""
        return self.rows * self.config.v_dim * self.config.out_bytes

    @cached_property
    def o_bytes(self) -> int:
        """Bytes of O of one query tile in shared memory."""
        return self._bytes_of_o if self.o_in_smem else 0

    @cached_property
    def least_bytes(self) -> int:
        """Bytes of shared memory with the fewest stages."""
        return hw.SMEM_BYTES_PER_CTA - self._free

    @cached_property
    def _least_stages(self) -> tuple[int, int]:
        tiles = 2 if self.sharers == 1 or self.config.k_is_v else 1
        least = tiles * self.k_pieces, tiles * self.v_pieces
        return self.config.k_stages or least[0], self.config.v_stages or least[1]

    @cached_property
    def _free(self) -> int:
        """Bytes left after the fewest stages, or after the configured ones."""
        k, v = self._least_stages
        tile = self.q_bytes + self.sharers * self.p_bytes + STATISTICS * self.statistics_bytes
        free = hw.SMEM_BYTES_PER_CTA - MISC_BYTES - self.q_tiles * tile
        free -= VT_STAGES * self.vt_bytes
        return free - k * self.k_bytes - v * self.v_bytes

    @cached_property
    def stages(self) -> tuple[int, int]:
        """Pieces in the rings (K, V): as configured, else as many as fit."""
        free = self._free - self.q_tiles * self.o_bytes
        k, v = self._least_stages
        if self.config.k_is_v:  # one ring, in which a tile stays as V after its S is done
            k, _ = self.grown(k, DEPTH * self.v_pieces, free)
            return k, k
        return self.grown(k, v, free)

    def smem(self, barrier_bytes: int) -> SmemPlan:
        """Shared memory of a CTA, in the order of allocation."""
        k_stages, v_stages = self.stages
        buffers = [
            SmemBuffer("barriers", barrier_bytes, align=hw.MBARRIER_BYTES),
            SmemBuffer("sQ", self.q_bytes, self.q_tiles),
            SmemBuffer("sK", self.k_bytes, k_stages),
            SmemBuffer("sV", self.v_bytes, v_stages),
            SmemBuffer("sVt", self.vt_bytes, VT_STAGES),
            SmemBuffer("sO", self.o_bytes, self.q_tiles),
            SmemBuffer("sP", self.p_bytes, self.teams),
            SmemBuffer("statistics", self.statistics_bytes, STATISTICS * self.q_tiles),
        ]
        return SmemPlan(tuple(buffer for buffer in buffers if buffer.bytes * buffer.stages))

    def check(self) -> None:
        """Raise NotImplementedError or ValueError for configs that the kernel does not support."""
        config = self.config
        check_pages_by_tma(config.page_size)
        if config.is_fp8 and config.head_dim not in FP8_SHAPES:
            raise NotImplementedError(
                f"head_dim {config.head_dim} with K and V in e4m3: one of {tuple(FP8_SHAPES)}"
            )
        if config.ctas not in (0, 1, 2):
            raise NotImplementedError(f"ctas {config.ctas}: 1 or 2, 0 for automatic")
        if config.tile_m % ROWS or self.teams not in self.registers:
            heights = tuple(
                ROWS * tiles for tiles in REGISTERS if tiles * self.sharers in self.registers
            )
            raise NotImplementedError(f"tile_m {config.tile_m}: one of {heights}, 0 for automatic")
        least = 2 * self.k_pieces  # if V is K: a tile of each warpgroup
        if config.k_is_v and (0 < config.k_stages < least or config.v_stages):
            raise ValueError(
                f"k_stages {config.k_stages} and v_stages {config.v_stages} with k_is_v: one ring "
                f"has the pieces of both products. Pass k_stages of at least {least}, or 0, and "
                "v_stages=0"
            )
        if config.k_stages % self.k_pieces or config.v_stages % self.v_pieces:
            raise ValueError(
                f"k_stages {config.k_stages} and v_stages {config.v_stages}: multiples of "
                f"{self.k_pieces} and {self.v_pieces}, the pieces of a tile (a stage always serves "
                "the same warpgroup), 0 for automatic"
            )
        if self.tile_n not in self.widths:
            raise NotImplementedError(
                f"tile_n {self.tile_n} with {self.q_tiles * ROWS} query rows of head_dim "
                f"{config.head_dim}: one of {self.widths} (registers), 0 for automatic"
            )
