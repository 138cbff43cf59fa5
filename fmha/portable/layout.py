"""AttentionConfig -> tiles and their places in shared memory, for mma.sync.

A team computes a query tile: 16 or 32 rows, with S, P and O in its registers. Up to head dim 128 a
team is one warp. Above, O of so many rows exceeds the registers of a warp. A team then has two or
four warps, each with a slice of the columns of V and O. They share Q K^T in one of two ways:

- 'base': each warp also has a slice of the columns of Q and K and computes Q K^T over it. The warps
  add these sums through shared memory, and P comes back through shared memory;
- 'keys': each of two warps has half of the keys of a tile, and passes only its half of P on.

Rows are contiguous in shared memory, each padded by 16 bytes. A row is then an odd number of
16-byte chunks. So the eight rows that ldmatrix reads at a time lie in eight different bank groups,
whatever the head dim is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from fmha.config import FP8, IO_DTYPES, PORTABLE_SCHEDULES, AttentionConfig
from fmha.tiles import Tiles
from kernelkit.compile.arch import WITHOUT_E4M3
from kernelkit.plan import hw
from kernelkit.plan.smem import SmemBuffer, SmemPlan

ROWS = 16  # of mma.sync
DIM_STEP = 16  # K of mma.sync; head dims are multiples of it
PAIR = 2  # warps that share keys
MOST_TEAMS = hw.NAMED_BARRIERS - hw.FIRST_NAMED_BARRIER  # each has a named barrier
MOST_PAIRS = MOST_TEAMS // 3  # each has three
MOST_COLUMNS = 256  # of O of 16 rows of a warp
KEY_STEP = 16  # keys of the B operands that one ldmatrix reads
PAD_BYTES = 16
SLICES = (1, 2, 4)
WIDTHS = (16, 32, 48, 64, 80, 96, 112, 128)  # keys of a tile
HELD_DIMS = 64  # columns of Q that fit in registers next to S, P and O
MIN_STAGES = 2  # key tiles in shared memory: one is read while the next one comes


@dataclass(frozen=True)
class Shape:
    """Division of a CTA's work.

    slices: warps of a team.
    row_tiles: tiles of 16 rows of a team.
    teams: teams of a CTA.
    tile_n: keys of a tile.
    residents: CTAs resident on an SM.
    schedule: how the warps of a team share Q K^T, 'base' or 'keys'.
    """

    slices: int
    row_tiles: int
    teams: int
    tile_n: int
    residents: int
    schedule: str = "base"

    @property
    def shares_keys(self) -> bool:
        return self.schedule == "keys"

    @property
    def dim_slices(self) -> int:
        """Warps that share the columns of Q and K."""
        return 1 if self.shares_keys else self.slices

    @property
    def score_keys(self) -> int:
        """Keys of a tile for which a warp computes S."""
        return self.tile_n // self.slices if self.shares_keys else self.tile_n


# Largest of head_dim and v_head_dim -> shapes; the first that fits in shared memory is used.
SHAPES: dict[int, tuple[Shape, ...]] = {
    64: (Shape(1, 2, 4, 64, 2), Shape(1, 2, 4, 32, 2)),
    128: (Shape(1, 2, 4, 64, 2), Shape(1, 2, 4, 32, 1), Shape(1, 1, 4, 32, 1)),
    256: (
        Shape(2, 2, 4, 64, 1, "keys"),
        Shape(2, 2, 4, 32, 1, "keys"),
        Shape(1, 1, 8, 64, 1),
        Shape(2, 2, 4, 48, 1),
        Shape(2, 2, 4, 32, 1),
        Shape(2, 2, 2, 32, 1),
        Shape(2, 2, 2, 16, 1),
    ),
    512: (
        Shape(4, 2, 2, 32, 1),
        Shape(4, 2, 2, 16, 1),
        Shape(4, 2, 1, 16, 1),
        Shape(4, 1, 1, 16, 1),
    ),
}


@dataclass(frozen=True)
class Layout(Tiles):
    """Sizes and places of one config on one architecture."""

    schedules: ClassVar = PORTABLE_SCHEDULES
    has_slices: ClassVar = True

    @cached_property
    def shape(self) -> Shape:
        """First shape of the head dim that fits, with the configured fields replaced."""
        found = [self._as_configured(shape) for shape in self._shapes()]
        return next((shape for shape in found if self._fits(shape)), found[-1])

    def _shapes(self) -> tuple[Shape, ...]:
        """Return the shapes of the head dim, restricted to the configured slices and schedule if
        possible.
        """
        config = self.config
        widest = max(config.head_dim, config.v_dim)
        found = next((shapes for most, shapes in SHAPES.items() if widest <= most), SHAPES[512])
        schedules = (config.schedule,) if config.schedule else ("base", "keys")
        found = tuple(one for one in found if one.schedule in schedules) or found
        return tuple(one for one in found if config.slices in (0, one.slices)) or found

    def _as_configured(self, shape: Shape) -> Shape:
        config = self.config
        tile_m = config.tile_m or shape.row_tiles * shape.teams * ROWS
        schedule = config.schedule or shape.schedule
        slices = config.slices or (PAIR if schedule == "keys" else shape.slices)
        row_tiles = shape.row_tiles if tile_m % (shape.row_tiles * ROWS) == 0 else 1
        # Columns of Q and K count if a warp has all of them; registers limit the columns of O.
        widest = config.v_dim if schedule == "keys" else max(config.head_dim, config.v_dim)
        whole = slices == 1 or schedule == "keys"
        if whole and self._padded(widest, slices) // slices * row_tiles > MOST_COLUMNS:
            row_tiles = 1
        return replace(
            shape,
            slices=slices,
            schedule=schedule,
            row_tiles=row_tiles,
            teams=max(tile_m // (row_tiles * ROWS), 1),
            tile_n=config.tile_n or shape.tile_n,
        )

    def _fits(self, shape: Shape) -> bool:
        if shape.shares_keys and not self._shares_out(shape):
            return False
        room = hw.smem_bytes_per_sm(self.arch) // shape.residents - hw.SMEM_RESERVED_BYTES
        return _Sized(self.config, shape).bytes <= room

    @staticmethod
    def _shares_out(shape: Shape) -> bool:
        """Return whether two warps share a tile in multiples of 16 keys, and barriers suffice for
        the teams.
        """
        halves = shape.slices == PAIR and shape.tile_n % (PAIR * KEY_STEP) == 0
        return halves and shape.teams <= MOST_PAIRS

    @property
    def sized(self) -> _Sized:
        """Sizes of the buffers."""
        return _Sized(self.config, self.shape)

    def smem(self) -> SmemPlan:
        """Return the shared memory of a CTA."""
        return SmemPlan(self.sized.buffers(), hw.smem_bytes_per_cta(self.arch))

    def check(self) -> None:
        config, shape = self.config, self.shape
        if config.is_fp8:
            raise NotImplementedError(
                f"K and V in {config.keys_dtype} with mma.sync: one of {IO_DTYPES}. "
                f"{config.keys_dtype} needs compute capability 9.0 or 10.x, and head dims of "
                "fmha.config.HEAD_DIMS up to 256"
            )
        if config.o_dtype == FP8 and self.arch in WITHOUT_E4M3:
            raise NotImplementedError(
                f"out_dtype {FP8} on {self.arch}: its conversion needs compute capability 8.9"
            )
        if config.k_is_v:
            raise NotImplementedError("k_is_v with mma.sync: K and V are loaded separately")
        if config.ctas > 1:
            raise NotImplementedError(f"ctas {config.ctas} with mma.sync: 1, CTAs form no pairs")
        if config.v_stages:
            raise NotImplementedError(
                f"v_stages {config.v_stages} with mma.sync: 0, k_stages counts for K and V"
            )
        if config.tile_m % ROWS:
            raise ValueError(f"tile_m {config.tile_m} with mma.sync: a multiple of {ROWS}")
        if shape.slices not in SLICES:
            raise ValueError(
                f"slices {shape.slices} with mma.sync: one of {SLICES}, 0 for automatic"
            )
        if shape.tile_n not in WIDTHS:
            widths = f"one of {WIDTHS}, 0 for automatic"
            raise ValueError(f"tile_n {shape.tile_n} with mma.sync: {widths}")
        if shape.shares_keys and not self._shares_out(shape):
            raise ValueError(
                f"schedule 'keys' with mma.sync, slices {shape.slices}, tile_n {shape.tile_n}, "
                f"tile_m {config.tile_m}: {PAIR} slices, a multiple of {PAIR * KEY_STEP} keys, at "
                f"most {MOST_PAIRS} pairs of warps"
            )
        if shape.slices > 1 and shape.teams > MOST_TEAMS:
            raise ValueError(
                f"tile_m {config.tile_m} with mma.sync: at most {MOST_TEAMS} teams of warps"
            )
        columns = max(config.head_dim, config.v_dim)
        if (pieces := columns * config.q_item_bytes // hw.SMEM_UNIT_BYTES) > self.threads:
            raise ValueError(
                f"tile_m {config.tile_m} with mma.sync and slices {shape.slices}: {self.threads} "
                f"threads, at least one for each of {pieces} pieces of a row of head dim {columns}"
            )
        if (shape.slices == 1 or shape.shares_keys) and config.k_stages not in (0, MIN_STAGES):
            raise ValueError(f"k_stages {config.k_stages} with mma.sync: {MIN_STAGES}")
        if self.sized.stages < MIN_STAGES:
            raise ValueError(f"k_stages {config.k_stages} with mma.sync: at least {MIN_STAGES}")

    def variants(self) -> Iterator[AttentionConfig]:
        for keys in WIDTHS[1:]:
            wide = replace(self.config, tile_n=keys)
            shape = Layout(wide, self.arch).shape
            shared = not shape.shares_keys or self._shares_out(shape)
            if keys <= self.tile_n and shape.tile_n == keys and shared:
                yield wide

    def larger(self) -> AttentionConfig | None:
        return None

    @property
    def rows(self) -> int:
        return self.shape.row_tiles * ROWS

    @property
    def q_tiles(self) -> int:
        return self.shape.teams

    @property
    def residents(self) -> int:
        return self.shape.residents

    @property
    def tile_n(self) -> int:
        return self.shape.tile_n

    @property
    def asks_weights(self) -> bool:
        """Whether a new maximum is computed only if weights show that the old one is too small."""
        return self.shape.slices == 1 and self.shape.row_tiles > 1

    @property
    def holds_q(self) -> bool:
        """Whether fragments of Q stay in registers, instead of being read for each key tile."""
        return self.shape.slices == 1 and self.dims <= HELD_DIMS

    @property
    def key_step(self) -> int:
        """Always 1: rows of keys are fetched one by one, and a tile may begin anywhere
        in a page.
        """
        return 1

    @property
    def stages(self) -> tuple[int, int]:
        return self.sized.stages, self.sized.stages

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
        return self.config.v_dim

    @property
    def warps(self) -> int:
        return self.shape.teams * self.shape.slices

    @property
    def threads(self) -> int:
        return self.warps * hw.WARP_THREADS

    @property
    def dims(self) -> int:
        """Columns of Q and K of a warp, padded with zeros in the last warp."""
        slices = self.shape.dim_slices
        return self._padded(self.config.head_dim, slices) // slices

    @property
    def o_columns(self) -> int:
        """Columns of V and O of a warp, padded likewise."""
        return self._padded(self.config.v_dim, self.shape.slices) // self.shape.slices

    @property
    def exp2_share(self) -> int:
        """Number of pairs of exponentials, out of 16, computed by a polynomial."""
        return max(self.config.polynomial, 0)

    @staticmethod
    def _padded(columns: int, slices: int) -> int:
        step = DIM_STEP * slices
        return -(-columns // step) * step


@dataclass(frozen=True)
class _Sized:
    """Bytes of the buffers of a config in a shape."""

    config: AttentionConfig
    shape: Shape

    @property
    def stages(self) -> int:
        """Stages of the K ring and of the V ring."""
        return self.config.k_stages or MIN_STAGES

    @property
    def rows(self) -> int:
        """Query rows of a CTA."""
        return self.shape.teams * self.shape.row_tiles * ROWS

    @property
    def k_row_bytes(self) -> int:
        return self._row_bytes(self.config.head_dim, self.shape.dim_slices)

    @property
    def v_row_bytes(self) -> int:
        return self._row_bytes(self.config.v_dim, self.shape.slices)

    def _row_bytes(self, columns: int, slices: int) -> int:
        return Layout._padded(columns, slices) * self.config.q_item_bytes + PAD_BYTES

    @property
    def p_row_bytes(self) -> int:
        return self.shape.tile_n * self.config.q_item_bytes + PAD_BYTES

    @property
    def trades(self) -> bool:
        """Whether two warps weigh 16 rows each, so that each needs half of the other's sums."""
        return self.shape.slices == 2 and self.shape.row_tiles == 2

    @property
    def tops_bytes(self) -> int:
        """Largest scores of a team's rows over each warp's keys, fp32."""
        return self.shape.slices * self.shape.row_tiles * ROWS * 4

    @property
    def sums_bytes(self) -> int:
        """Bytes of the fp32 sums over slices that the warps of a team exchange.

        All sums, or those that two warps trade. If warps share keys: largest scores of two tiles.
        """
        if self.shape.shares_keys:
            return 2 * self.tops_bytes
        traded = 1 if self.trades else self.shape.row_tiles
        return self.shape.slices * traded * ROWS * self.shape.tile_n * 4

    def buffers(self) -> tuple[SmemBuffer, ...]:
        """Return the buffers in memory order; buffers of teams of one warp are empty."""
        shape, team_rows = self.shape, self.shape.row_tiles * ROWS
        shared = shape.slices > 1
        return (
            SmemBuffer("sQ", self.rows * self.k_row_bytes, align=16),
            SmemBuffer("sK", shape.tile_n * self.k_row_bytes, self.stages, align=16),
            SmemBuffer("sV", shape.tile_n * self.v_row_bytes, self.stages, align=16),
            SmemBuffer("sSums", self.sums_bytes * shared, shape.teams, align=16),
            SmemBuffer("sP", team_rows * self.p_row_bytes * shared, shape.teams, align=16),
            SmemBuffer("sFactors", team_rows * 4 * shared, shape.teams, align=16),
            SmemBuffer("sMoved", 16 * shared, shape.teams, align=16),
        )

    @property
    def bytes(self) -> int:
        return SmemPlan(self.buffers()).bytes
