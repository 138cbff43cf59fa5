"""AttentionConfig -> tiles, pieces and their places in shared memory and TMEM.

A tile is 128 query rows by 128 keys, or fewer. TMA moves pieces: K in slices of the head dim that
accumulate into one S, V in slices of its columns, each a piece of O. A piece lies in shared memory
as panels: all its rows, at most 128 bytes of each, swizzled inside every line. Both operands of
both products, and the O that TMA stores, use this arrangement.

In a CTA pair (head_dim 256 and 512) each CTA has 64 keys of K and half the columns of each piece
of V; the pair's MMA reads both. At head_dim 256 each CTA has a query tile. At 512 they share one,
64 rows each. An accumulator of 64 rows uses all 128 lanes of TMEM (PTX ISA, data path layout B):
lanes 0-63 hold the first half of the columns, lanes 64-127 the second half of the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from fmha.config import AttentionConfig, check_pages_by_tma
from fmha.tiles import Tiles
from kernelkit.plan import hw
from kernelkit.plan.smem import SmemBuffer, SmemPlan
from kernelkit.plan.tmem import TmemPlan, TmemRange

TILE_N = range(64, 129, 16)  # keys of a tile: an MMA processes 16, or 32 in e4m3
TILE_M = 128  # query rows of a tile: one TMEM lane each, or two halves of a row in a pair
CHUNK = 32  # scores of a row that are masked, rounded and moved at a time
MMA_LAG = 2  # products Q K^T issued before the first one's P V
STATISTICS = 2  # numbers that softmax warps pass to the correction: acc_scale; row_sum, row_max
HALVES_SLOTS = 3  # halves of a row exchange once per tile, in two alternating slots, and at the end
OUT_STAGES = 2  # panels of O in shared memory: one is written while the other is stored
MISC_BYTES = 1024  # barriers and the TMEM address, before the first aligned buffer
MMA_K_BYTES = 32  # bytes of a row of A or B that one MMA reads

# Columns of a K piece and of a V piece by (head_dim, v_dim). Small tiles are one piece, as all are
# in e4m3. From 192 on tiles are sliced: whole ones would leave room for only one stage.
K_PIECE = {64: 64, 96: 96, 128: 128, 192: 64, 256: 128, 512: 256}
V_PIECE = {64: 64, 96: 96, 128: 128, 256: 256, 512: 256}

# By head dim, for tiles whose exponentials last at least as long as the products. From the cycle
# model of a B200; a GB300, whose MUFU is twice as fast, does not need it.
EXP2_SHARE = {64: 4, 96: 4, 128: 4, 192: 6}
PAIR_HEAD_DIM = 256  # K and V of two tiles exceed shared memory: each CTA of a pair has half
SHARED_TILE_HEAD_DIM = 512  # O of 128 rows fills TMEM: each CTA of a pair has 64 rows


@dataclass(frozen=True)
class Layout(Tiles):
    """Sizes and places of one config."""

    @cached_property
    def ctas(self) -> int:
        """CTAs that share K and V."""
        return 2 if self.config.head_dim >= PAIR_HEAD_DIM else 1

    @cached_property
    def halves(self) -> int:
        """Number of threads that share a query row: 2 if a pair of CTAs shares one tile of 128
        rows.
        """
        return 2 if self.config.head_dim >= SHARED_TILE_HEAD_DIM else 1

    @cached_property
    def p_in_smem(self) -> bool:
        """Whether P waits for P V in shared memory.

        Otherwise P overwrites the tail of its S in tensor memory, which needs a row in one lane.
        """
        return self.halves == 2

    @cached_property
    def q_tiles(self) -> int:
        """Query tiles of 128 rows that a CTA keeps in flight, each with its softmax warpgroup."""
        return 2 if self.config.schedule == "pingpong" else 1

    @cached_property
    def exp2_share(self) -> int:
        """Number of pairs of exponentials, out of 16, computed by a polynomial."""
        config = self.config
        chosen = EXP2_SHARE.get(config.head_dim, 0)
        return config.polynomial if config.polynomial >= 0 else chosen

    def larger(self) -> AttentionConfig | None:
        return None if self.config.schedule else replace(self.config, schedule="pingpong")

    def variants(self) -> Iterator[AttentionConfig]:
        """Yield the config with all widths of a key tile; a pair has one width, 128 keys."""
        if self.ctas == 1:
            yield from (replace(self.config, tile_n=keys) for keys in self.tiles_n)

    @cached_property
    def mma_k(self) -> int:
        """K of one MMA: columns of Q, or keys."""
        return MMA_K_BYTES // self.config.io_bytes

    @cached_property
    def tiles_n(self) -> tuple[int, ...]:
        """Allowed numbers of keys of a tile."""
        return tuple(keys for keys in TILE_N if keys % self.mma_k == 0)

    @cached_property
    def tile_n(self) -> int:
        """Keys of a tile."""
        return self.config.tile_n or TILE_N[-1]

    @cached_property
    def rows(self) -> int:
        """Query rows of a tile in this CTA; the other CTA of a pair holds the rest."""
        return TILE_M // self.halves

    @cached_property
    def mma_rows(self) -> int:
        """Rows of an MMA, of both CTAs of a pair."""
        return self.rows * self.ctas

    @cached_property
    def lag(self) -> int:
        """Number of key tiles by which P V lags behind Q K^T."""
        return MMA_LAG // self.q_tiles

    @cached_property
    def s_stages(self) -> int:
        """Number of S buffers. With a third one the next Q K^T need not wait for the P
        V before it.
        """
        taken = self.q_tiles * self.config.v_dim // self.halves
        more = MMA_LAG + 1
        fits = taken + more * self.lane_columns <= hw.TMEM_COLUMNS
        return more if fits else MMA_LAG

    @cached_property
    def k_rows(self) -> int:
        """Keys of a K piece in this CTA; the other CTA of a pair holds the rest."""
        return self.tile_n // self.ctas

    @cached_property
    def k_columns(self) -> int:
        """Columns of a K piece."""
        return self.config.head_dim if self.config.is_fp8 else K_PIECE[self.config.head_dim]

    @cached_property
    def o_tile(self) -> int:
        """Columns of O that one P V product makes (N of its MMA)."""
        return V_PIECE[self.config.v_dim]

    @cached_property
    def lane_columns(self) -> int:
        """Columns of S that one thread holds."""
        return self.tile_n // self.halves

    @cached_property
    def p_columns(self) -> tuple[int, ...]:
        """Columns of each part of P that is signalled to the MMA warp.

        Two parts if the next Q K^T has to wait for P V: most of P V then overlaps the last
        exponentials.
        """
        if self.s_stages > MMA_LAG or self.p_in_smem or self.q_tiles == 1:
            return (self.tile_n,)
        return self.tile_n - CHUNK, CHUNK

    @cached_property
    def o_panel(self) -> int:
        """Columns of O in one line of the panels that TMA stores."""
        return self.panel(self.o_columns, self.config.out_bytes)

    @cached_property
    def o_columns(self) -> int:
        """Columns of a piece of O that one thread holds."""
        return self.o_tile // self.halves

    @cached_property
    def o_chunk(self) -> int:
        """Columns of O that a thread holds at a time, limited by its registers."""
        return min(16 if self.config.rope_dim else 32, self.o_panel)

    @cached_property
    def out_pieces(self) -> int:
        """Panels of O of one query tile; in a shared tile of both halves of the rows."""
        return self.config.v_dim // self.halves // self.o_panel

    @cached_property
    def out_bytes(self) -> int:
        """Bytes of a panel of O."""
        return hw.TMEM_LANES * self.o_panel * self.config.out_bytes

    @cached_property
    def p_bytes(self) -> int:
        """Bytes of P of one query tile in shared memory, 0 if it stays in TMEM."""
        return self.rows * self.tile_n * self.config.io_bytes if self.p_in_smem else 0

    @cached_property
    def statistics_bytes(self) -> int:
        """Bytes of the buffer through which threads exchange statistics of a row."""
        slots = STATISTICS * self.q_tiles + HALVES_SLOTS * (self.halves - 1)
        return slots * hw.TMEM_LANES * 4

    @cached_property
    def out_stages(self) -> int:
        """Panels of O that wait for the store; fewer than useful if shared memory is short."""
        return OUT_STAGES if self._free >= OUT_STAGES * self.out_bytes else 1

    @cached_property
    def _free(self) -> int:
        """Bytes left after one tile of K and of V, or after the configured stages."""
        k, v = self._least_stages
        free = hw.SMEM_BYTES_PER_CTA - MISC_BYTES - self.statistics_bytes
        free -= self.q_tiles * (self.q_bytes + self.p_bytes)
        return free - k * self.k_bytes - v * self.v_bytes

    @cached_property
    def _least_stages(self) -> tuple[int, int]:
        return self.config.k_stages or self.k_pieces, self.config.v_stages or self.v_pieces

    @cached_property
    def stages(self) -> tuple[int, int]:
        """(pieces in the K ring, pieces in the V ring): as configured, else as many as fit.

        The whole first V tile has to fit: its rows past a length are zeroed together.
        """
        return self.grown(*self._least_stages, self._free - self.out_stages * self.out_bytes)

    def smem(self, barrier_bytes: int) -> SmemPlan:
        """Shared memory of one CTA, in the order of allocation."""
        k_stages, v_stages = self.stages
        buffers = [
            SmemBuffer("barriers", barrier_bytes, align=hw.MBARRIER_BYTES),
            SmemBuffer("tmem_base", 4, align=4),
            SmemBuffer("statistics", self.statistics_bytes, align=16),
            SmemBuffer("sQ", self.q_bytes, self.q_tiles),
            SmemBuffer("sK", self.k_bytes, k_stages),
            SmemBuffer("sV", self.v_bytes, v_stages),
            SmemBuffer("sP", self.p_bytes, self.q_tiles),
            SmemBuffer("sO", self.out_bytes, self.out_stages),
        ]
        return SmemPlan(tuple(buffer for buffer in buffers if buffer.bytes))

    @cached_property
    def tmem(self) -> TmemPlan:
        """Columns of tensor memory."""
        width = self.lane_columns
        ranges = []
        for stage in range(self.s_stages):
            begin = stage * width
            ranges.append(TmemRange(f"S{stage}", begin, width, "S, fp32"))
            if not self.p_in_smem:
                # The softmax has S in registers when it writes P.
                columns = self.tile_n * self.config.io_bytes // hw.TMEM_CELL_BYTES
                payload = f"P, {self.config.keys_dtype}, same tile"
                ranges.append(
                    TmemRange(f"P{stage}", begin + width - columns, columns, payload, f"S{stage}")
                )
        columns = self.config.v_dim // self.halves
        for q_tile in range(self.q_tiles):
            begin = self.s_stages * width + q_tile * columns
            ranges.append(TmemRange(f"O{q_tile}", begin, columns, "O, fp32"))
        return TmemPlan(tuple(ranges))

    def check(self) -> None:
        """Raise ValueError or NotImplementedError for what does not fit, with the arithmetic."""
        config = self.config
        check_pages_by_tma(config.page_size)
        if config.is_fp8 and config.head_dim >= SHARED_TILE_HEAD_DIM:
            raise NotImplementedError(
                f"head_dim {config.head_dim} with K and V in e4m3: at most {PAIR_HEAD_DIM}"
            )
        if config.tile_m:
            raise NotImplementedError(f"tile_m {config.tile_m}: 0, a query tile has {TILE_M} rows")
        if config.ctas:
            raise NotImplementedError(f"ctas {config.ctas}: 0, the head dim determines it")
        if config.k_is_v:
            raise NotImplementedError("k_is_v: False, here V is loaded separately")
        if config.tile_n and config.tile_n not in self.tiles_n:
            raise NotImplementedError(
                f"tile_n {config.tile_n}: one of {self.tiles_n}, 0 for automatic"
            )
        if self.q_tiles == 2 and (self.ctas, self.k_pieces, self.v_pieces) != (1, 1, 1):
            raise ValueError(
                f"schedule 'pingpong' at head_dim {config.head_dim}: two query tiles would take "
                f"{2 * self.q_bytes} bytes of SMEM and {2 * (self.tile_n + config.v_dim)} TMEM "
                f"columns of {hw.TMEM_COLUMNS}, and every piece of K and V has to stay for both; "
                "use 'base'"
            )
        if self.ctas == 2 and self.tile_n != TILE_N[-1]:
            raise ValueError(
                f"tile_n {self.tile_n} at head_dim {config.head_dim}: 128, each CTA of a pair has "
                "half of it"
            )
        _, v_stages = self.stages
        if v_stages < self.v_pieces:
            raise ValueError(
                f"v_stages {v_stages}: at least {self.v_pieces}, the pieces of a V tile, whose "
                "rows past a length are zeroed together"
            )
        self.tmem.check()
