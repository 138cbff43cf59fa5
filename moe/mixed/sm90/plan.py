"""Warps, barriers and shared memory of Hopper's grouped GEMM, as data.

A tile is tile_rows rows of one expert by tile_n rows of its matrix. A warpgroup multiplies 64 rows
of the matrix at a time, or twice 64, which it has in registers as bf16, by all rows of the expert,
which are in shared memory: the result is transposed. A stage of the ring has one unit of K, of
both, or two; one warp fetches them, another one walks over the tiles. Where a cluster shares a
tile, each of its CTAs does all that with a part of K.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kernelkit import hw
from kernelkit.arrivals import Signal
from kernelkit.edges import Edge, EdgePlan
from kernelkit.smem_plan import SmemBuffer, SmemPlan
from kernelkit.warps import Role, RolePlan
from moe.mixed.config import BITS, REGISTERS, ROWS, MixedConfig
from moe.mixed.fragments import DEPTH, unit_bytes
from moe.sm100.plan import TILE_STAGES  # of the same scheduler

PAIR = 2  # units of K, of which one becomes bf16 while the other is multiplied
TILE_WORDS = 8  # int32 of a slot of the tile queue
MAX_STAGES = 16
BARRIER_BYTES = 1024
MAX_AHEAD = 5
SMALL, LEAST = 32, 8  # rows of a tile
MOST_WIDTHS = 3
CHUNK = 32  # rows of the output that a warpgroup has in shared memory at a time
STORE_BARRIER = 1  # and the next ones: threads of a warpgroup whose outputs meet


@dataclass(frozen=True)
class MixedPlan:
    """Everything about a config that is decided before tracing."""

    config: MixedConfig

    @cached_property
    def roles(self) -> RolePlan:
        """Warps of a CTA."""
        teams = self.config.teams
        computes, loads = REGISTERS[teams]
        first = 4 * teams
        duty = f"weights to {self.config.x}, products, output"
        last = ("idle", "leaves its registers to those who compute")
        if self.config.gather:
            last = ("gather", "rows of x from where the tokens are")
        return RolePlan(
            (
                Role("math", 0, first, duty, computes, teams),
                Role("load", first, 1, "weights as they lie, x by TMA", loads),
                Role("scheduler", first + 1, 1, "the walk over tiles, from offsets", loads),
                Role(last[0], first + 2, 2, last[1], loads),
            )
        )  # fmt: skip

    @property
    def units(self) -> int:
        """Of K in a stage: one where it is large anyway."""
        return PAIR if self.config.tile_rows <= SMALL else 1

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns of products, which are rows of x: all of a tile, or half of them where it has no
        more, and so on as far as registers go."""
        config = self.config
        most = REGISTERS[config.teams][0]
        halves = (config.tile_rows >> n for n in range(MOST_WIDTHS))
        return tuple(
            width
            for n, width in enumerate(halves)
            if width >= LEAST and config.registers(n + 1) <= most
        )

    @property
    def unit_bytes(self) -> int:
        """Of 64 rows of weights by 64 of K."""
        return unit_bytes(self.config.fmt)

    @property
    def tall(self) -> int:
        """64 rows of weights in a tile."""
        return self.config.tile_n // ROWS

    @property
    def w_bytes(self) -> int:
        """Of a stage."""
        return self.tall * self.units * self.unit_bytes

    @property
    def x_bytes(self) -> int:
        """Of one unit of K of a stage."""
        return self.config.tile_rows * self.line

    @property
    def line(self) -> int:
        """Bytes of a row of x in a unit of K."""
        return DEPTH * self.config.x_bits // 8

    @property
    def outputs(self) -> int:
        """Columns of the output of a warpgroup."""
        return self.config.tile_outputs // self.config.teams

    @property
    def out_bytes(self) -> int:
        """What a warpgroup has in shared memory of them."""
        return min(CHUNK, self.config.tile_rows) * self.out_line

    @property
    def out_line(self) -> int:
        """Bytes of a row of the output in a tile, of a warpgroup."""
        return self.outputs * BITS[self.config.out] // 8

    @property
    def scale_bytes(self) -> int:
        """What a warpgroup has of the scales of rows."""
        return 4 * self.config.tile_rows if self.config.x == "e4m3" else 0

    @property
    def blocks(self) -> int:
        """Of eight rows of x, of which a thread has four sums for each 64 rows of weights."""
        return self.config.tile_rows // 8

    @property
    def mail_bytes(self) -> int:
        """Of a warpgroup's sums, where another CTA may finish them."""
        return 4 * ROWS * self.config.parts * self.config.tile_rows

    @property
    def mails(self) -> int:
        """Sums of other CTAs that a CTA has room for: it finishes some of its warpgroups'."""
        split = self.config.split
        return -(-self.config.teams // split) * (split - 1)

    @cached_property
    def stages(self) -> int:
        """Of the ring: what shared memory holds."""
        room = hw.SMEM_BYTES_PER_CTA - BARRIER_BYTES - 2 * hw.SMEM_SWIZZLE_ALIGN
        room -= self.config.teams * (2 * self.out_bytes + self.scale_bytes)
        room -= 4 * self.config.tile_rows + self.mails * self.mail_bytes
        return min(MAX_STAGES, room // (self.units * self.x_bytes + self.w_bytes))

    @property
    def ahead(self) -> int:
        """Stages of gathered rows in flight: with more nobody would go on, see `lag`."""
        return min(MAX_AHEAD, self.stages - self.lag - 1)

    @property
    def lag(self) -> int:
        """Stages that have to be full, beside one, before it is free: two units of K are waited for
        at a time, while the two before are still multiplied."""
        return 3 if self.units == 1 else 1

    @cached_property
    def smem(self) -> SmemPlan:
        """Shared memory of a CTA, in the order of allocation."""
        return SmemPlan(
            (
                SmemBuffer("barriers", BARRIER_BYTES, align=hw.MBARRIER_BYTES),
                SmemBuffer("tiles", 4 * TILE_WORDS, TILE_STAGES, align=16),
                SmemBuffer("x", self.x_bytes, self.units * self.stages),
                SmemBuffer("w", self.w_bytes, self.stages, align=128),
                SmemBuffer("out", self.out_bytes, 2 * self.config.teams, align=128),
                SmemBuffer("table", 4 * self.config.tile_rows, align=16),
                SmemBuffer("scales", self.scale_bytes, self.config.teams, align=16),  # or nothing
                *self._mail_buffers,
            )
        )

    @property
    def _mail_buffers(self) -> tuple[SmemBuffer, ...]:
        """What CTAs that share a tile send each other, with mbarriers of each warpgroup: sums have
        come, and their place is free."""
        if not self.mails:
            return ()
        return (
            SmemBuffer("mail", self.mail_bytes, self.mails, align=128),
            SmemBuffer("mail_barriers", 2 * hw.MBARRIER_BYTES, self.config.teams, align=16),
        )

    @cached_property
    def edges(self) -> EdgePlan:
        """Who waits for whom. Tiles go to each role that wants them by an edge of its own."""
        tiles = tuple(
            Edge(f"tile_{role}", "scheduler", role, TILE_STAGES, Signal.THREADS, "tile",
                 release=Signal.THREADS, every_team=True)
            for role in ("load", "math", *(("gather",) if self.config.gather else ()))
        )  # fmt: skip
        x_bytes = 0 if self.config.gather else self.units * self.x_bytes
        ring = Edge("ab", "load", "math", self.stages, Signal.TMA, "stage of w and x",
                    tx_bytes=x_bytes + self.w_bytes, release=Signal.WARPS,
                    every_team=True)  # fmt: skip
        gathered = Edge("x", "gather", "math", self.stages, Signal.THREADS, "stage of x",
                        release=Signal.WARPS, every_team=True)  # fmt: skip
        return EdgePlan(self.roles, (*tiles, ring, *((gathered,) if self.config.gather else ())))

    def check(self) -> None:
        """Raise ValueError for what no CTA can hold."""
        self.roles.check()
        least = self.lag + (2 if self.config.gather else 1)
        if self.stages < least:
            raise ValueError(f"{self.stages} stages of {self.config}: at least {least}")
        self.edges.check()
        self.smem.check()
        if self.edges.barrier_bytes > BARRIER_BYTES:
            raise ValueError(f"{self.edges.barrier_bytes} bytes of mbarriers > {BARRIER_BYTES}")


def make_plan(config: MixedConfig) -> MixedPlan:
    """The checked plan of a config."""
    config.check_values()
    plan = MixedPlan(config)
    plan.check()
    return plan
