"""Warps, barriers and shared memory of the score kernel of Hopper, as data.

A product has M = 64 keys, N = the heads of a group of tokens, and K = 128 elements: four wgmmas of
one warpgroup. Two warpgroups multiply, and each turns its accumulators into scores. If the CTA has
one group, each of them takes one half of every tile. Otherwise warpgroup t has groups t and t + 2,
and takes both halves. It then issues a product before it turns the previous one into scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kernelkit.plan import hw
from kernelkit.plan.edges import Edge, EdgePlan, Signal
from kernelkit.plan.smem import SmemBuffer, SmemPlan
from kernelkit.plan.warps import Role, RolePlan
from mla.indexer.scores_config import KEYS, WgmmaConfig
from mla.indexer.shared.plan import STAGE_SCALE_BYTES, TiledPlan

M = 64  # keys of a product
HALVES = KEYS // M
TEAMS = 2
STAGES = {1: 12, 4: 8}  # of the rings, by groups of a CTA
BARRIER_BYTES = 512
MATH, LOAD = 232, 40  # registers of a thread

ROLES = RolePlan(
    (
        Role("math", 0, 8, "products; ReLU, weights, sum over heads; store", MATH, TEAMS),
        Role("load", 8, 1, "load queries and keys by TMA", LOAD),
        Role("scales", 9, 1, "load scales of keys, word by word", LOAD),
        Role("idle", 10, 2, "give registers to the warps that multiply", LOAD),
    )
)


@dataclass(frozen=True)
class Plan90(TiledPlan):
    """Everything about a config that is decided before tracing."""

    config: WgmmaConfig

    @property
    def stages(self) -> int:
        """Number of stages of the rings of keys and of scales."""
        return STAGES[self.config.groups]

    @property
    def ctas_per_sm(self) -> int:
        """Number of CTAs per SM; unless a kernel is compiled for one, setmaxnreg is ignored."""
        return 1

    @cached_property
    def smem(self) -> SmemPlan:
        """Shared memory of a CTA, in the order of allocation."""
        return SmemPlan(
            (
                SmemBuffer("barriers", BARRIER_BYTES, align=hw.MBARRIER_BYTES),
                SmemBuffer("spans", 8 * (self.config.tokens + 1), align=8),
                SmemBuffer("weights", 4 * self.config.columns, align=16),
                SmemBuffer("key_scales", STAGE_SCALE_BYTES, self.stages, align=16),
                SmemBuffer("q", self.row_bytes * self.config.n, self.config.groups),
                SmemBuffer("keys", self.row_bytes * KEYS, self.stages),
            )
        )

    @cached_property
    def edges(self) -> EdgePlan:
        """Producer-consumer edges between the roles; both warpgroups read every tile."""
        queries = Edge("q", "load", "math", 1, Signal.TMA, "queries", freed_by="exit",
                       tx_bytes=self.row_bytes * self.config.columns, every_team=True)  # fmt: skip
        keys = Edge("keys", "load", "math", self.stages, Signal.TMA, "tile of keys",
                    tx_bytes=self.row_bytes * KEYS, release=Signal.WARPS,
                    every_team=True)  # fmt: skip
        scales = Edge("scales", "scales", "math", self.stages, Signal.THREADS, "scales of keys",
                      release=Signal.WARPS, every_team=True)  # fmt: skip
        return EdgePlan(ROLES, (queries, keys, scales))


def make_plan(config: WgmmaConfig) -> Plan90:
    """Make and check the plan of a config."""
    plan = Plan90(config)
    plan.check()
    return plan
