"""Warps, barriers and shared memory of the product of numbers, as data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from kernelkit.plan import hw
from kernelkit.plan.barriers import BarrierPlan, NamedBarrier
from kernelkit.plan.edges import Edge, EdgePlan, Signal
from kernelkit.plan.smem import SmemBuffer, SmemPlan
from kernelkit.plan.warps import Role, RolePlan
from q8_0.numbers.config import (
    STEP_K,
    TEAM_ROWS,
    TEAMS,
    TILE_ROWS,
    UNIT,
    NumbersConfig,
)

COMPUTES, LOADS = 232, 40  # registers of a thread
BARRIER_BYTES = 512
LINE = 128  # bytes of a line of quants, of tokens, and of results in shared memory
CHUNK = 32  # tokens of the result that a warpgroup has in shared memory at a time
FEWEST_STAGES, MOST_STAGES = 4, 8  # of tokens
NARROW_STAGES = 6  # of few tokens, whose products are short beside the latency of a copy
WEIGHT_STAGES, MOST_WEIGHT_BYTES = 2, 112 << 10  # of weights


@dataclass(frozen=True)
class NumbersPlan:
    """Properties of a config that are decided before tracing."""

    config: NumbersConfig

    @cached_property
    def roles(self) -> RolePlan:
        """Warps of a CTA."""
        first = TEAMS * hw.WARPGROUP_WARPS
        copied = "copy scales, or blocks" if self.config.copies else "give registers away"
        return RolePlan(
            (
                Role("math", 0, first, "round weights, products, results", COMPUTES, TEAMS),
                Role("load", first, 1, "tokens and weights by TMA", LOADS),
                Role("copy", first + 1, 2, copied, LOADS),
                Role("idle", first + 3, 1, "give registers away", LOADS),
            )
        )

    # Bytes of shared memory

    @property
    def x_bytes(self) -> int:
        """Tokens of a stage."""
        return self.config.tile_tokens * LINE

    @property
    def w_bytes(self) -> int:
        """Quants or blocks of a stage."""
        return TILE_ROWS * (self.config.row_bytes if self.config.interleaved else STEP_K)

    @property
    def scales_bytes(self) -> int:
        """Scales of a stage, where they are apart."""
        return 0 if self.config.interleaved else TILE_ROWS * self.config.row_bytes

    @property
    def chunk(self) -> int:
        """Tokens of the result that a warpgroup has in shared memory at a time."""
        return math.gcd(CHUNK, 8 * self.config.own_blocks)

    @property
    def out_bytes(self) -> int:
        """A chunk of results of a warpgroup."""
        return self.chunk * TEAM_ROWS * 2 if self.config.staged else 0

    @property
    def mail_bytes(self) -> int:
        """Sums of all CTAs that share a tile, for the tokens that one of them stores."""
        config = self.config
        sums = TILE_ROWS * 8 * config.own_blocks * config.split
        return 4 * sums if config.split > 1 else 0

    @cached_property
    def stages(self) -> tuple[int, int]:
        """Stages of tokens and of weights: as many as fit."""
        room = hw.SMEM_BYTES_PER_CTA - BARRIER_BYTES - 2 * hw.SMEM_SWIZZLE_ALIGN
        room -= self.mail_bytes or 2 * TEAMS * self.out_bytes
        of_weights = self.w_bytes + self.scales_bytes
        wanted = FEWEST_STAGES if self.config.tile_tokens > 128 else NARROW_STAGES
        weights = min(MOST_WEIGHT_BYTES, room - wanted * self.x_bytes) // of_weights
        weights = max(weights, WEIGHT_STAGES)
        tokens = min(MOST_STAGES, (room - weights * of_weights) // self.x_bytes)
        return tokens, weights

    @cached_property
    def smem(self) -> SmemPlan:
        """Shared memory of a CTA, in the order of allocation."""
        tokens, weights = self.stages
        # Once the sums of other CTAs are here, no warpgroup reads tokens any more.
        over = "x" if self.mail_bytes else None
        return SmemPlan(
            (
                SmemBuffer("barriers", BARRIER_BYTES, align=hw.MBARRIER_BYTES),
                SmemBuffer("x", self.x_bytes, tokens),
                SmemBuffer("w", self.w_bytes, weights),
                SmemBuffer("scales", self.scales_bytes, weights, align=128),
                SmemBuffer("out", self.out_bytes, 2 * TEAMS, align=128, over=over),
                SmemBuffer("mail", self.mail_bytes, align=128),
                SmemBuffer("mail_barrier", hw.MBARRIER_BYTES, align=hw.MBARRIER_BYTES),
            )
        )

    @cached_property
    def edges(self) -> EdgePlan:
        """Edges between producers and consumers."""
        tokens, weights = self.stages
        config = self.config
        edges = [
            Edge("x", "load", "math", tokens, Signal.TMA, "columns of tokens",
                 tx_bytes=self.x_bytes, release=Signal.WARPS, every_team=True,
                 multicast=config.pair),
        ]  # fmt: skip
        if not config.interleaved or config.whole:
            edges.append(
                Edge("w", "load", "math", weights, Signal.TMA, "quants, or blocks",
                     tx_bytes=self.w_bytes, release=Signal.WARPS, every_team=True)
            )  # fmt: skip
        if config.copies:
            edges.append(
                Edge("copied", "copy", "math", weights, Signal.THREADS, "scales, or blocks",
                     release=Signal.WARPS, every_team=True)
            )  # fmt: skip
        return EdgePlan(self.roles, tuple(edges), ctas=2 if config.pair else 1, pairs=config.split)

    @cached_property
    def barriers(self) -> BarrierPlan:
        """Named barriers."""
        threads = self.roles["math"].team_threads
        stored = NamedBarrier("stored", ("math",), threads, "a chunk is complete, or read", TEAMS)
        return BarrierPlan(self.roles, (stored,))

    def check(self) -> None:
        """Raise ValueError if a CTA cannot hold the plan."""
        self.roles.check()
        self.edges.check()
        self.smem.check()
        self.barriers.check()
        tokens, weights = self.stages
        if tokens < FEWEST_STAGES or weights < WEIGHT_STAGES:
            raise ValueError(
                f"{tokens} stages of tokens and {weights} of weights: at least {FEWEST_STAGES} and "
                f"{WEIGHT_STAGES}"
            )
        if self.edges.barrier_bytes > BARRIER_BYTES:
            raise ValueError(
                f"{self.edges.barrier_bytes} bytes of mbarriers, limit {BARRIER_BYTES}"
            )
        if UNIT * 2 != LINE:
            raise ValueError(f"units of {UNIT} columns: lines have {LINE} bytes")


def make_plan(config: NumbersConfig) -> NumbersPlan:
    """The checked plan of a config."""
    config.check_values()
    plan = NumbersPlan(config)
    plan.check()
    return plan
