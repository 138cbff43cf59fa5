"""AttentionConfig -> tiles and where each of them lies in shared memory, on Hopper.

A query tile is 64 rows, what one warpgroup multiplies by a tile of keys; S, P and O stay in its
registers. A block is two or three of them, for all of which K and V are loaded once. Tiles lie in
shared memory as panels: all rows, at most 128 bytes of each, swizzled inside every line.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from fmha.config import AttentionConfig
from fmha.tiles import Tiles
from kernelkit import hw
from kernelkit.smem_plan import SmemBuffer, SmemPlan

ROWS = 64  # M of wgmma
WIDTHS = range(48, 193, 16)  # keys of a tile
# Registers of a thread by warpgroups that compute: of theirs, and of those that load.
REGISTERS = {1: (240, 40), 2: (240, 24), 3: (160, 32)}
OTHER_REGISTERS = 28  # that the loop needs beside S, P and O
MISC_BYTES = 1024  # barriers: what lies before the first aligned buffer


@dataclass(frozen=True)
class Shape:
    """What suits a head dim.

    polynomial: of 16 pairs of exponentials those that leave the MUFU; early: sixteenths of a tile
    that are exponentiated before P V of the tile before is waited for. pairs: whether CTAs that
    share what they fetch are faster, without a right edge and with one: they cost some cycles, and
    spare the power that moving K and V twice takes.
    """

    q_tiles: int
    tile_n: int
    schedule: str
    polynomial: int = 0
    early: int = 8
    pairs: tuple[bool, bool] = (False, False)


SHAPES = {
    64: Shape(3, 128, "pingpong", early=0, pairs=(False, True)),
    96: Shape(2, 128, "pingpong"),
    128: Shape(2, 128, "pingpong"),
    192: Shape(2, 112, "pingpong", pairs=(True, True)),
    256: Shape(2, 80, "base", pairs=(True, True)),
}


@dataclass(frozen=True)
class Layout(Tiles):
    """Sizes and places of one config."""

    @property
    def shape(self) -> Shape:
        """What suits the head dim."""
        head_dim = self.config.head_dim
        if head_dim not in SHAPES:
            raise NotImplementedError(f"head_dim {head_dim} on Hopper: one of {tuple(SHAPES)}")
        return SHAPES[head_dim]

    @property
    def widths(self) -> tuple[int, ...]:
        """Keys of a tile that registers hold: S and P of one, and O."""
        free = REGISTERS[self.q_tiles][0] - OTHER_REGISTERS - self.config.v_dim // 2
        return tuple(keys for keys in WIDTHS if keys * 3 // 4 <= free)

    def variants(self) -> Iterator[AttentionConfig]:
        """With all heights of a block and widths of a key tile that fit."""
        for tile_m in (self.config.tile_m,) if self.config.tile_m else (2 * ROWS, 3 * ROWS):
            tall = replace(self.config, tile_m=tile_m)
            for keys in Layout(tall).widths:
                wide = replace(tall, tile_n=keys)
                if Layout(wide).least_bytes <= hw.SMEM_BYTES_PER_CTA:
                    yield wide

    def larger(self) -> AttentionConfig | None:
        config = self.config
        pays = self.shape.pairs[config.right] and not config.left and config.group == 1
        pays = pays and not config.varlen_q and not config.page_size
        return replace(config, ctas=2) if pays and not config.ctas else None

    @property
    def tile_n(self) -> int:
        return self.config.tile_n or self.shape.tile_n

    @property
    def rows(self) -> int:
        return ROWS

    @property
    def q_tiles(self) -> int:
        """Warpgroups that compute, each its own query tile."""
        return self.config.tile_m // ROWS or self.shape.q_tiles

    @property
    def ctas(self) -> int:
        return self.config.ctas or 1

    @property
    def multicast(self) -> bool:
        return self.ctas > 1

    @property
    def ordered(self) -> bool:
        """Warpgroups issue their products in turn, and the softmax of one runs under those of
        others."""
        return (self.config.schedule or self.shape.schedule) == "pingpong"

    @property
    def exp2_share(self) -> int:
        """Pairs of exponentials, of 16, that go through the polynomial."""
        config = self.config
        return config.polynomial if config.polynomial >= 0 else self.shape.polynomial

    @property
    def k_rows(self) -> int:
        return self.tile_n

    @property
    def k_columns(self) -> int:
        return self.config.head_dim

    @property
    def o_tile(self) -> int:
        return self.config.v_dim

    @property
    def o_panel(self) -> int:
        line = hw.SMEM_LINE_BYTES // self.config.out_bytes
        return line if self.config.v_dim % line == 0 else line // 2

    @property
    def o_in_smem(self) -> bool:
        """O goes to shared memory and from there by TMA. In fp32 four lanes write whole sectors of
        global memory, and there is nothing to gain."""
        return self.config.out_bytes == self.config.io_bytes

    @property
    def o_over_q(self) -> bool:
        """O takes the place of Q, whose last product is done: where else there is no room."""
        return self.o_in_smem and self._free < self.q_tiles * self.o_bytes

    @property
    def o_bytes(self) -> int:
        """Bytes of O of one query tile in shared memory."""
        return self.rows * self.config.v_dim * self.config.io_bytes if self.o_in_smem else 0

    @property
    def least_bytes(self) -> int:
        """Of shared memory: with two tiles of K and of V, and O over Q."""
        return hw.SMEM_BYTES_PER_CTA - self._free

    @property
    def _least_stages(self) -> tuple[int, int]:
        return self.config.k_stages or 2, self.config.v_stages or 2

    @property
    def _free(self) -> int:
        """Bytes that are left beside two tiles of K and of V, or what is configured."""
        k, v = self._least_stages
        free = hw.SMEM_BYTES_PER_CTA - MISC_BYTES - self.q_tiles * self.q_bytes
        return free - k * self.k_bytes - v * self.v_bytes

    @cached_property
    def stages(self) -> tuple[int, int]:
        """(tiles in the K ring, in the V ring): as configured, else as many as fit."""
        free = self._free - (0 if self.o_over_q else self.q_tiles * self.o_bytes)
        return self.grown(*self._least_stages, free)

    def smem(self, barrier_bytes: int) -> SmemPlan:
        """Shared memory of a CTA, in the order of allocation."""
        k_stages, v_stages = self.stages
        o_tiles = 0 if self.o_over_q else self.q_tiles
        buffers = [
            SmemBuffer("barriers", barrier_bytes, align=hw.MBARRIER_BYTES),
            SmemBuffer("sQ", self.q_bytes, self.q_tiles),
            SmemBuffer("sK", self.k_bytes, k_stages),
            SmemBuffer("sV", self.v_bytes, v_stages),
            SmemBuffer("sO", self.o_bytes, o_tiles),
        ]
        return SmemPlan(tuple(buffer for buffer in buffers if buffer.bytes * buffer.stages))

    def check(self) -> None:
        """Raise NotImplementedError or ValueError for what the kernel does not do."""
        config = self.config
        if config.ctas not in (0, 1, 2):
            raise NotImplementedError(f"ctas {config.ctas}: 1 or 2, 0 chooses")
        if config.tile_m % ROWS or self.q_tiles not in REGISTERS:
            heights = tuple(ROWS * teams for teams in REGISTERS)
            raise NotImplementedError(f"tile_m {config.tile_m}: one of {heights}, 0 chooses")
        if self.tile_n not in self.widths:
            raise NotImplementedError(
                f"tile_n {self.tile_n} with {self.q_tiles * ROWS} query rows of head_dim "
                f"{config.head_dim}: registers hold {self.widths}, 0 chooses"
            )
