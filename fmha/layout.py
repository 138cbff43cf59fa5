"""AttentionConfig -> tiles, pieces and where each of them lies: shared memory and TMEM maps.

A tile is 128 query rows by 128 keys. What TMA moves at a time is a piece: K in slices of the head
dim that accumulate into one S, V in slices of its columns, each a piece of O. A piece lies in
shared memory as panels: all its rows, at most 128 bytes of each, swizzled inside every line. Both
operands of both products, and the O that TMA stores, use that one arrangement.

A CTA pair (head_dim 512) shares the tile. Each CTA has 64 query rows, and of K 64 keys, of V half
the columns of each piece; the pair's MMA reads both. An accumulator of 64 rows takes all 128 lanes
of TMEM (PTX ISA, data path layout B): lanes 0-63 hold the first half of the columns, lanes 64-127
the second half of the same rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fmha.config import AttentionConfig
from kernelkit import hw
from kernelkit.smem_plan import SmemBuffer, SmemPlan
from kernelkit.tmem_plan import TmemPlan, TmemRange

TILE_M = 128  # query rows of a tile: one TMEM lane each, or two halves of a row in a pair
TILE_N = 128  # keys of a tile
S_STAGES = 2  # Q K^T of tile i + 1 runs under the softmax of tile i
DEPTH = 3  # tiles of K and of V in flight that hide the latency of global memory
# Slots of a row: halves of a row meet once per tile, and two of them save a barrier; the softmax
# warps of the ping-pong schedule pass (acc_scale), and at the end (row_sum, row_max), of two query
# tiles.
STATISTICS_SLOTS = 4
MISC_BYTES = 1024  # barriers and the TMEM address: what lies before the first aligned buffer

# Columns of a K piece and of a V piece by (head_dim, v_dim): whole tiles while they are small,
# slices from 192 on, where whole tiles would leave room for one stage only.
K_PIECE = {64: 64, 96: 96, 128: 128, 192: 64, 256: 128, 512: 256}
V_PIECE = {64: 64, 96: 96, 128: 128, 256: 128, 512: 128}


@dataclass(frozen=True)
class Layout:
    """Sizes and places of one config."""

    config: AttentionConfig

    @property
    def rows(self) -> int:
        """Query rows of a tile in this CTA; the other CTA of a pair holds the rest."""
        return TILE_M // self.config.ctas

    @property
    def block_rows(self) -> int:
        """Query rows of a block: what a CTA, or a pair, computes."""
        return TILE_M * self.config.q_tiles

    @property
    def lead(self) -> int:
        """How many tiles Q K^T runs ahead of P V."""
        return S_STAGES // self.config.q_tiles

    @property
    def k_rows(self) -> int:
        """Keys of a K piece in this CTA; the other CTA of a pair holds the rest."""
        return TILE_N // self.config.ctas

    @property
    def k_columns(self) -> int:
        """Columns of a K piece."""
        return K_PIECE[self.config.head_dim]

    @property
    def k_pieces(self) -> int:
        """Pieces of a K tile."""
        return self.config.head_dim // self.k_columns

    @property
    def o_tile(self) -> int:
        """Columns of O that one P V product makes (N of its MMA)."""
        return V_PIECE[self.config.v_dim]

    @property
    def v_columns(self) -> int:
        """Columns of a V piece in this CTA."""
        return self.o_tile // self.config.ctas

    @property
    def v_pieces(self) -> int:
        """Pieces of a V tile, and of O."""
        return self.config.v_dim // self.o_tile

    @property
    def lane_columns(self) -> int:
        """Columns of S that one thread holds."""
        return TILE_N // self.config.ctas

    def panel(self, columns: int) -> int:
        """io elements of one line of a panel that divides `columns`: 128 or 64 bytes."""
        line = hw.SMEM_LINE_BYTES // self.config.io_bytes
        return line if columns % line == 0 else line // 2

    @property
    def o_panel(self) -> int:
        """Columns of O in one line of the panels that TMA stores."""
        line = hw.SMEM_LINE_BYTES // self.config.out_bytes
        return line if self.v_columns % line == 0 else line // 2

    @property
    def o_chunk(self) -> int:
        """Columns of O that a thread holds at a time: what its registers allow."""
        return 16 if self.config.q_tiles == 2 else 32

    @property
    def q_bytes(self) -> int:
        """Bytes of one query tile in this CTA."""
        return self.rows * self.config.head_dim * self.config.io_bytes

    @property
    def k_bytes(self) -> int:
        """Bytes of a K piece in this CTA."""
        return self.k_rows * self.k_columns * self.config.io_bytes

    @property
    def v_bytes(self) -> int:
        """Bytes of a V piece in this CTA."""
        return TILE_N * self.v_columns * self.config.io_bytes

    @property
    def p_bytes(self) -> int:
        """Bytes of P of one query tile in shared memory, 0 where it stays in TMEM."""
        return self.rows * TILE_N * self.config.io_bytes if self.config.p_in_smem else 0

    @property
    def statistics_bytes(self) -> int:
        """Bytes through which threads tell each other a row's maximum and sum."""
        slots = hw.TMEM_LANES * STATISTICS_SLOTS
        return slots * 4 if self.config.ctas == 2 or self.config.q_tiles == 2 else 0

    @property
    def o_bytes(self) -> int:
        """Bytes of O that wait for the TMA store."""
        return self.config.q_tiles * self.rows * self.config.v_dim * self.config.out_bytes

    @cached_property
    def stages(self) -> tuple[int, int]:
        """(pieces in the K ring, pieces in the V ring): as configured, else as many as fit.

        The ring that is the shallower in tiles grows first. The whole first V tile has to fit: its
        rows past a length are zeroed before the first P announces it.
        """
        config = self.config
        k, v = config.k_stages or self.k_pieces, config.v_stages or self.v_pieces
        free = hw.SMEM_BYTES_PER_CTA - MISC_BYTES - self.statistics_bytes
        free -= config.q_tiles * (self.q_bytes + self.p_bytes)
        free -= k * self.k_bytes + v * self.v_bytes
        while not (config.k_stages and config.v_stages):
            k_depth, v_depth = k / self.k_pieces, v / self.v_pieces
            grow_k = not config.k_stages and (config.v_stages > 0 or k_depth <= v_depth)
            needed, depth = (self.k_bytes, k_depth) if grow_k else (self.v_bytes, v_depth)
            if needed > free or depth >= DEPTH:
                break
            free -= needed
            k, v = (k + 1, v) if grow_k else (k, v + 1)
        return k, v

    def smem(self, barrier_bytes: int) -> SmemPlan:
        """Shared memory of one CTA, in the order of allocation."""
        k_stages, v_stages = self.stages
        buffers = [
            SmemBuffer("barriers", barrier_bytes, align=hw.MBARRIER_BYTES),
            SmemBuffer("tmem_base", 4, align=4),
            SmemBuffer("statistics", self.statistics_bytes, align=16),
            SmemBuffer("sQ", self.q_bytes, self.config.q_tiles),
            SmemBuffer("sK", self.k_bytes, k_stages),
            SmemBuffer("sV", self.v_bytes, v_stages),
            SmemBuffer("sP", self.p_bytes, self.config.q_tiles),
            # The last O is waited for, so no product is in flight and Q, K and V are dead.
            SmemBuffer("sO", self.o_bytes, over="sQ"),
        ]
        return SmemPlan(tuple(buffer for buffer in buffers if buffer.bytes))

    @cached_property
    def tmem(self) -> TmemPlan:
        """Columns of tensor memory."""
        width = self.lane_columns
        ranges = []
        for stage in range(S_STAGES):
            begin = stage * width
            ranges.append(TmemRange(f"S{stage}", begin, width, f"S, fp32, tiles {stage} mod 2"))
            if not self.config.p_in_smem:
                # The softmax has S in registers when it writes P. At the tail of S it leaves the
                # head columns free for the row statistics of schedules that publish them there.
                columns = TILE_N * self.config.io_bytes // hw.TMEM_CELL_BYTES
                payload = f"P, {self.config.dtype}, same tile"
                ranges.append(
                    TmemRange(f"P{stage}", begin + TILE_N - columns, columns, payload, f"S{stage}")
                )
        columns = self.config.v_dim // self.config.ctas
        for q_tile in range(self.config.q_tiles):
            begin = S_STAGES * width + q_tile * columns
            ranges.append(TmemRange(f"O{q_tile}", begin, columns, "O, fp32"))
        return TmemPlan(tuple(ranges))

    def check(self) -> None:
        """Raise ValueError with the arithmetic of what does not fit."""
        config = self.config
        if config.ctas == 2 and not config.p_in_smem:
            raise ValueError(
                f"p_path 'tmem' at head_dim {config.head_dim}: an A operand in TMEM keeps a row in "
                f"one lane, and the {TILE_M} rows of O would take {config.v_dim} columns of the "
                f"{hw.TMEM_COLUMNS}, beside {S_STAGES * TILE_N} of S; use 'smem'"
            )
        if config.q_tiles == 2 and (config.ctas, self.k_pieces, self.v_pieces) != (1, 1, 1):
            raise ValueError(
                f"schedule 'pingpong' at head_dim {config.head_dim}: two query tiles would take "
                f"{2 * self.q_bytes} bytes of SMEM and {2 * (TILE_N + config.v_dim)} TMEM columns "
                f"of {hw.TMEM_COLUMNS}, and every piece of K and V has to stay for both; use 'base'"
            )
        _, v_stages = self.stages
        if v_stages < self.v_pieces:
            raise ValueError(
                f"v_stages {v_stages}: at least {self.v_pieces}, the pieces of a V tile, whose "
                "rows past a length are zeroed together"
            )
        self.tmem.check()
