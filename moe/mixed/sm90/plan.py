"""Warps, barriers and shared memory of Hopper's grouped GEMM, as data.

A tile is tile_rows rows of one expert by tile_n rows of its matrix. A warpgroup multiplies 64 rows
of the matrix at a time, or twice 64, which it has in registers as bf16, by all rows of the expert,
which are in shared memory: the result is transposed. A stage of the ring has two units of K, of
both; one warp fetches them, another one walks over the tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kernelkit import hw
from kernelkit.arrivals import Signal
from kernelkit.edges import Edge, EdgePlan
from kernelkit.smem_plan import SmemBuffer, SmemPlan
from kernelkit.warps import Role, RolePlan
from moe.mixed.config import ROWS, MixedConfig
from moe.mixed.fragments import DEPTH, unit_bytes
from moe.sm100.plan import TILE_STAGES  # of the same scheduler

UNITS = 2  # of K in a stage
TILE_WORDS = 8  # int32 of a slot of the tile queue
MAX_STAGES = 16
BARRIER_BYTES = 1024
MAX_AHEAD = 4
CHUNK = 32  # rows of the output that a warpgroup has in shared memory at a time
# Of a thread by warpgroups that compute: of theirs, and of those who load.
REGISTERS = {
    1: (240, 64), 2: (216, 72), 3: (152, 56), 4: (104, 64), 5: (80, 80), 6: (72, 72),
}  # fmt: skip
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
        last = ("idle", "leaves its registers to those who compute")
        if self.config.gather:
            last = ("gather", "rows of x from where the tokens are")
        return RolePlan(
            (
                Role("math", 0, first, "weights to bf16, products, SwiGLU, output", computes, teams),
                Role("load", first, 1, "weights as they lie, x by TMA", loads),
                Role("scheduler", first + 1, 1, "the walk over tiles, from offsets", loads),
                Role(last[0], first + 2, 2, last[1], loads),
            )
        )  # fmt: skip

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
        return self.tall * UNITS * self.unit_bytes

    @property
    def x_bytes(self) -> int:
        """Of one unit of K of a stage."""
        return self.config.tile_rows * DEPTH * 2

    @property
    def outputs(self) -> int:
        """Columns of the output of a warpgroup."""
        return self.config.tile_outputs // self.config.teams

    @property
    def out_bytes(self) -> int:
        """What a warpgroup has in shared memory of them."""
        return min(CHUNK, self.config.tile_rows) * self.outputs * 2

    @cached_property
    def stages(self) -> int:
        """Of the ring: what shared memory holds."""
        room = hw.SMEM_BYTES_PER_CTA - BARRIER_BYTES - 2 * hw.SMEM_SWIZZLE_ALIGN
        room -= 2 * self.config.teams * self.out_bytes + 4 * self.config.tile_rows
        return min(MAX_STAGES, room // (UNITS * self.x_bytes + self.w_bytes))

    @property
    def ahead(self) -> int:
        """Stages of gathered rows in flight. Who computes frees a stage when it has the next one:
        with one more in flight nobody would go on."""
        return min(MAX_AHEAD, self.stages - 2)

    @cached_property
    def smem(self) -> SmemPlan:
        """Shared memory of a CTA, in the order of allocation."""
        return SmemPlan(
            (
                SmemBuffer("barriers", BARRIER_BYTES, align=hw.MBARRIER_BYTES),
                SmemBuffer("tiles", 4 * TILE_WORDS, TILE_STAGES, align=16),
                SmemBuffer("x", self.x_bytes, UNITS * self.stages),
                SmemBuffer("w", self.w_bytes, self.stages, align=128),
                SmemBuffer("out", self.out_bytes, 2 * self.config.teams, align=128),
                SmemBuffer("table", 4 * self.config.tile_rows, align=16),
            )
        )

    @cached_property
    def edges(self) -> EdgePlan:
        """Who waits for whom. Tiles go to each role that wants them by an edge of its own."""
        tiles = tuple(
            Edge(f"tile_{role}", "scheduler", role, TILE_STAGES, Signal.THREADS, "tile",
                 release=Signal.THREADS, every_team=True)
            for role in ("load", "math", *(("gather",) if self.config.gather else ()))
        )  # fmt: skip
        x_bytes = 0 if self.config.gather else UNITS * self.x_bytes
        ring = Edge("ab", "load", "math", self.stages, Signal.TMA, "stage of w and x",
                    tx_bytes=x_bytes + self.w_bytes, release=Signal.WARPS,
                    every_team=True)  # fmt: skip
        gathered = Edge("x", "gather", "math", self.stages, Signal.THREADS, "stage of x",
                        release=Signal.WARPS, every_team=True)  # fmt: skip
        return EdgePlan(self.roles, (*tiles, ring, *((gathered,) if self.config.gather else ())))

    def check(self) -> None:
        """Raise ValueError for what no CTA can hold."""
        self.roles.check()
        least = 3 if self.config.gather else 2
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
