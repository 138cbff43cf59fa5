"""Warps, barriers, shared memory and tensor memory of Blackwell's mixed product, as data.

The tensor core reads 128 rows of bf16 weights from tensor memory, as the M of its product, and rows
of x from shared memory, as its N. A warpgroup converts a unit of 64 rows of weights at a time. Each
warp uses 16 of the 32 lanes that it can access: the first half or, for the next unit, the second.
An accumulator of 16 lanes is a fragment of the epilogue's registers. So a row of a tile is stored
as follows:

    row 64 u + 16 w + r: block u // 2, lane 32 w + 16 (u % 2) + r
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kernelkit.plan import hw
from kernelkit.plan.edges import Edge, EdgePlan, Signal
from kernelkit.plan.smem import SmemBuffer, SmemPlan
from kernelkit.plan.tmem import TmemPlan, TmemRange
from kernelkit.plan.warps import Role, RolePlan
from moe.mixed.config import HALVES, MixedConfig, unit_columns
from moe.mixed.plan import (
    BARRIER_BYTES,
    CHUNK,
    MAX_STAGES,
    TILE_STAGES,
    TILE_WORDS,
    ProductPlan,
)

MOST_WIDTHS = 3
MOST_A_STAGES = 4
MOST_TEAMS = 4
MANY = 128  # rows of a tile from which products take longer than converting weights


@dataclass(frozen=True)
class MixedPlan(ProductPlan):
    """Everything about a config that is decided before tracing."""

    @cached_property
    def roles(self) -> RolePlan:
        """Warps of a CTA."""
        first = 4 * self.config.teams * self.turns
        roles = (
            Role("math", 0, first, "convert weights to bf16 in tensor memory", teams=self.turns),
            Role("epilogue", first, 4, "factor, bias, SwiGLU, output"),
            Role("mma", first + 4, 1, "D += A B on the tensor core"),
            Role("load", first + 5, 1, "load weights as stored, x by TMA"),
            Role("scheduler", first + 6, 1, "assign tiles, from offsets"),
        )
        gather = Role("gather", first + 7, 4, "gather rows of x of the tokens")
        return RolePlan((*roles, gather) if self.config.gather else roles)

    @property
    def turns(self) -> int:
        """Number of groups of warpgroups, which alternate over the stages. Each group converts all
        rows of weights of its stages. While some wait for their loads, others compute. One group is
        enough if products take longer."""
        return 1 if self.config.tile_rows >= MANY else MOST_TEAMS // self.config.teams

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of products, in rows of x: a whole tile, half of it if the expert has no more
        rows, and so on, in whole chunks of the epilogue."""
        halves = (self.config.tile_rows >> n for n in range(MOST_WIDTHS))
        return tuple(width for n, width in enumerate(halves) if n == 0 or width >= CHUNK)

    @property
    def parts(self) -> int:
        """Times 64 rows of weights that the epilogue stores: those of the tile."""
        return self.tall

    @property
    def outputs(self) -> int:
        """Columns of the output of a tile."""
        return self.config.tile_outputs

    @property
    def blocks(self) -> int:
        """Number of 128-row blocks of weights in a tile; each has an accumulator."""
        return self.tall // HALVES

    @property
    def sum_columns(self) -> int:
        """Columns of tensor memory for the accumulators of a tile."""
        return self.blocks * self.config.tile_rows

    @property
    def a_columns(self) -> int:
        """Columns of tensor memory for a stage of weights."""
        return self.units * self.blocks * unit_columns(self.config)

    @property
    def acc_stages(self) -> int:
        """Number of tiles whose accumulators fit."""
        twice = 2 * self.sum_columns + 2 * self.a_columns
        return 2 if twice <= hw.TMEM_COLUMNS else 1

    @property
    def a_stages(self) -> int:
        """Stages of weights in tensor memory."""
        room = hw.TMEM_COLUMNS - self.acc_stages * self.sum_columns
        return self.whole_turns(min(MOST_A_STAGES, room // self.a_columns))

    @cached_property
    def tmem(self) -> TmemPlan:
        """The accumulators of a tile or two, and stages of weights."""
        sums, a = self.acc_stages * self.sum_columns, self.a_stages * self.a_columns
        return TmemPlan(
            (
                TmemRange("acc", 0, sums, "accumulators, fp32: one block after the other"),
                TmemRange("a", sums, a, "weights in bf16: by K, then by block"),
            )
        )

    @cached_property
    def stages(self) -> int:
        """Stages of both rings: as many as shared memory holds."""
        room = hw.SMEM_BYTES_PER_CTA - BARRIER_BYTES - 2 * hw.SMEM_SWIZZLE_ALIGN
        room -= 2 * self.out_bytes
        return self.whole_turns(min(MAX_STAGES, room // (self.units * self.x_bytes + self.w_bytes)))

    def whole_turns(self, stages: int) -> int:
        """Round `stages` down so that a group of warps always uses the same stages. It then waits
        for every phase of their barriers. If it skipped a phase, it would mistake the previous
        phase, which has the same parity, for the one that it waits for."""
        return stages - stages % self.turns

    @property
    def lag(self) -> int:
        """No further stages: the tensor core uses one stage after the other."""
        return 0

    @cached_property
    def smem(self) -> SmemPlan:
        """Shared memory of a CTA, in the order of allocation."""
        return SmemPlan(
            (
                SmemBuffer("barriers", BARRIER_BYTES, align=hw.MBARRIER_BYTES),
                SmemBuffer("tmem_base", 4, align=4),
                SmemBuffer("tiles", 4 * TILE_WORDS, TILE_STAGES, align=16),
                SmemBuffer("x", self.x_bytes, self.units * self.stages),
                SmemBuffer("w", self.w_bytes, self.stages, align=128),
                SmemBuffer("out", self.out_bytes, 2, align=128),
            )
        )

    @cached_property
    def edges(self) -> EdgePlan:
        """Edges between producers and consumers."""
        weights = Edge("w", "load", "math", self.stages, Signal.TMA, "stage of weights",
                       tx_bytes=self.w_bytes, release=Signal.WARPS)  # fmt: skip
        if self.config.gather:
            x = Edge("x", "gather", "mma", self.stages, Signal.THREADS, "stage of x",
                     release=Signal.UMMA)  # fmt: skip
        else:
            x = Edge("x", "load", "mma", self.stages, Signal.TMA, "stage of x",
                     tx_bytes=self.moved_x, release=Signal.UMMA)  # fmt: skip
        a = Edge("a", "math", "mma", self.a_stages, Signal.THREADS, "weights in bf16",
                 release=Signal.UMMA)  # fmt: skip
        acc = Edge("acc", "mma", "epilogue", self.acc_stages, Signal.UMMA, "accumulators",
                   release=Signal.THREADS)  # fmt: skip
        tiles = self.tile_edges("load", "math", "mma", "epilogue")
        return EdgePlan(self.roles, (*tiles, weights, x, a, acc))

    def check(self) -> None:
        """Raise ValueError if a CTA cannot hold the plan."""
        super().check()
        self.tmem.check()


def make_plan(config: MixedConfig) -> MixedPlan:
    """The checked plan of a config."""
    config.check_values("sm_100a")
    plan = MixedPlan(config)
    plan.check()
    return plan
