"""Warps, barriers and shared memory of Hopper's mixed product, as data.

A warpgroup multiplies 64 rows of the matrix at a time, or twice 64, by all rows of the expert. The
matrix is bf16 in registers, the rows are in shared memory. One warp fetches both, another one
schedules tiles. If a cluster shares a tile, each of its CTAs does all that with a part of K.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from kernelkit.plan import hw
from kernelkit.plan.edges import Edge, EdgePlan, Signal
from kernelkit.plan.smem import SmemBuffer, SmemPlan
from kernelkit.plan.warps import Role, RolePlan
from moe.mixed.config import REGISTERS, ROWS, MixedConfig
from moe.mixed.plan import (
    BARRIER_BYTES,
    MAX_STAGES,
    TILE_STAGES,
    TILE_WORDS,
    ProductPlan,
)

LEAST = 8  # rows of a tile
MOST_WIDTHS = 2  # each needs a box of x, and every TMA copy takes about 90 cycles
EARLY = 8  # registers of a thread for 64 rows of weights: factors, biases, and some to spare


@dataclass(frozen=True)
class MixedPlan(ProductPlan):
    """Properties of a config that are decided before tracing. Units of K come in pairs: one becomes
    bf16 while the other is multiplied."""

    @cached_property
    def roles(self) -> RolePlan:
        """Warps of a CTA."""
        teams = self.config.teams
        computes, loads = REGISTERS[teams]
        first = 4 * teams
        duty = f"convert weights to {self.config.x}, products, output"
        last = ("idle", "give registers to the warps that compute")
        if self.config.gather:
            last = ("gather", "gather rows of x of the tokens")
        return RolePlan(
            (
                Role("math", 0, first, duty, computes, teams),
                Role("load", first, 1, "load weights as stored, x by TMA", loads),
                Role("scheduler", first + 1, 1, "assign tiles, from offsets", loads),
                Role(last[0], first + 2, 2, last[1], loads),
            )
        )  # fmt: skip

    small_bytes: ClassVar[int] = 8192

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of products, in rows of x: a whole tile, half of it if the expert has no more
        rows, and so on as far as registers allow."""
        config = self.config
        most = REGISTERS[config.teams][0]
        halves = (config.tile_rows >> n for n in range(MOST_WIDTHS))
        return tuple(
            width
            for n, width in enumerate(halves)
            if width >= LEAST and config.registers(n + 1) <= most
        )

    @property
    def is_early(self) -> bool:
        """Whether a thread fetches biases and factors before its sums are complete: if registers
        allow."""
        config = self.config
        most = REGISTERS[config.teams][0]
        return config.registers(len(self.widths)) + EARLY * config.parts <= most

    @property
    def parts(self) -> int:
        """Times 64 rows of weights that a warpgroup multiplies, and stores."""
        return self.config.parts

    @property
    def outputs(self) -> int:
        """Columns of the output of a warpgroup."""
        return self.config.tile_outputs // self.config.teams

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of rows, for a warpgroup."""
        return 4 * self.config.tile_rows if self.config.x == "e4m3" else 0

    @property
    def blocks(self) -> int:
        """Number of blocks of eight rows of x. A thread has four sums of each, for each 64 rows of
        weights."""
        return self.config.tile_rows // 8

    @property
    def mail_bytes(self) -> int:
        """Bytes of a warpgroup's sums, in the CTA that may finish them."""
        return 4 * ROWS * self.config.parts * self.config.tile_rows

    @property
    def mails(self) -> int:
        """Number of buffers for other CTAs' sums of the warpgroups that this CTA finishes."""
        split = self.config.split
        return -(-self.config.teams // split) * (split - 1)

    @cached_property
    def stages(self) -> int:
        """Stages of the ring: as many as shared memory holds."""
        room = hw.SMEM_BYTES_PER_CTA - BARRIER_BYTES - 2 * hw.SMEM_SWIZZLE_ALIGN
        room -= self.config.teams * (2 * self.out_bytes + self.scale_bytes)
        room -= 4 * self.config.tile_rows + self.mails * self.mail_bytes
        return min(MAX_STAGES, room // (self.units * self.x_bytes + self.w_bytes))

    @property
    def lag(self) -> int:
        """Stages as above: two units of K are waited for at a time, while the two before them are
        still multiplied."""
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
                SmemBuffer("scales", self.scale_bytes, self.config.teams, align=16),  # may be empty
                *self._mail_buffers,
            )
        )

    @property
    def _mail_buffers(self) -> tuple[SmemBuffer, ...]:
        """Buffers for the sums that CTAs sharing a tile exchange, and two mbarriers of each
        warpgroup: sums have arrived, and their slots are free."""
        if not self.mails:
            return ()
        return (
            SmemBuffer("mail", self.mail_bytes, self.mails, align=128),
            SmemBuffer("mail_barriers", 2 * hw.MBARRIER_BYTES, self.config.teams, align=16),
        )

    @cached_property
    def edges(self) -> EdgePlan:
        """Edges between producers and consumers."""
        ring = Edge("ab", "load", "math", self.stages, Signal.TMA, "stage of w and x",
                    tx_bytes=self.moved_x + self.w_bytes, release=Signal.WARPS,
                    every_team=True)  # fmt: skip
        gathered = Edge("x", "gather", "math", self.stages, Signal.THREADS, "stage of x",
                        release=Signal.WARPS, every_team=True)  # fmt: skip
        rings = (ring, *((gathered,) if self.config.gather else ()))
        return EdgePlan(self.roles, (*self.tile_edges("load", "math"), *rings))


def make_plan(config: MixedConfig) -> MixedPlan:
    """The checked plan of a config."""
    config.check_values("sm_90a")
    plan = MixedPlan(config)
    plan.check()
    return plan
