"""Warps, barriers, shared memory and tensor memory of the block-scaled score kernel, as data.

A product has M = the 128 keys of a tile, N = the heads of all tokens of the CTA, and K = 128
elements: two MMAs. Queries are loaded once, with their scale factors and weights; keys come through
a ring. The scale factors of a row are one word of four bytes. In shared memory they form an atom
(`kernelkit.device.umma`), whose words are not in the order of rows; TMA cannot write this order. A
stage of keys and its scale factors are freed together.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kernelkit.plan import hw
from kernelkit.plan.edges import Edge, EdgePlan, Signal
from kernelkit.plan.smem import SmemBuffer, SmemPlan
from kernelkit.plan.tmem import TmemPlan, TmemRange
from kernelkit.plan.warps import Role, RolePlan
from mla.indexer.scores_config import KEYS, BlockScaledConfig
from mla.indexer.shared.plan import SCALE_BYTES, STAGE_SCALE_BYTES, TiledPlan

ATOM_BYTES = STAGE_SCALE_BYTES
ATOM_COLUMNS = 4
K_BLOCKS = 2  # MMAs of a product
SCALES_OF_BLOCK = 2  # scale factors of a row in one MMA
STAGES = 8
AHEAD = 3  # tiles whose scale factors are in flight
ACC_STAGES = 3
TEAMS = 2
BARRIER_BYTES = 384
# Largest number of columns that a thread of the epilogue holds at a time, by CTAs of an SM. The
# registers of a thread set the limit.
PARTS = {1: 64, 2: 32}

ROLES = RolePlan(
    (
        Role("epilogue", 0, 8, "ReLU, weights, sum over heads: one key per thread", teams=TEAMS),
        Role("mma", 8, 1, "scale factors to tensor memory, then D = K Q^T on the tensor core"),
        Role("load", 9, 1, "load queries and keys by TMA"),
        Role("scales", 10, 1, "load scale factors of keys, word by word"),
    )
)


@dataclass(frozen=True)
class ScoresPlan(TiledPlan):
    """Everything about a config that is decided before tracing."""

    config: BlockScaledConfig

    @property
    def stages(self) -> int:
        """Number of stages of the rings of keys and of scale factors."""
        return STAGES

    @property
    def scale_steps(self) -> tuple[int, int]:
        """Steps in an atom, which has the words of rows l, l + 32, l + 64 and l + 96 together."""
        return ATOM_BYTES // hw.WARP_THREADS, SCALE_BYTES

    @property
    def n(self) -> int:
        """N of an MMA, which is the number of columns of an accumulator."""
        return self.config.columns

    @property
    def part(self) -> int:
        """Number of columns of a token that the epilogue holds at a time."""
        return min(self.config.heads, PARTS[self.ctas_per_sm])

    @cached_property
    def smem(self) -> SmemPlan:
        """Shared memory of a CTA, in the order of allocation."""
        return SmemPlan(
            (
                SmemBuffer("barriers", BARRIER_BYTES, align=hw.MBARRIER_BYTES),
                SmemBuffer("tmem_base", 4, align=4),
                SmemBuffer("spans", 8 * (self.config.tokens + 1), align=8),
                SmemBuffer("weights", 4 * self.n, align=16),
                SmemBuffer("q_scales", ATOM_BYTES, align=128),
                SmemBuffer("key_scales", ATOM_BYTES, STAGES, align=128),
                SmemBuffer("q", self.row_bytes * self.n),
                SmemBuffer("keys", self.row_bytes * KEYS, STAGES),
            )
        )

    @cached_property
    def tmem(self) -> TmemPlan:
        """Tensor memory of the accumulators and of the scale factors of one product."""
        n, scales = self.n, ACC_STAGES * self.n
        accumulators = (
            TmemRange(f"acc{stage}", stage * n, n, "accumulator, fp32")
            for stage in range(ACC_STAGES)
        )
        return TmemPlan(
            (
                *accumulators,
                TmemRange("key_scales", scales, ATOM_COLUMNS, "scale factors of keys"),
                TmemRange(
                    "q_scales", scales + ATOM_COLUMNS, ATOM_COLUMNS, "scale factors of queries"
                ),
            )
        )

    @property
    def ctas_per_sm(self) -> int:
        """Number of CTAs per SM that fit in tensor memory, at most two."""
        return min(2, hw.TMEM_COLUMNS // self.tmem.allocated)

    @cached_property
    def edges(self) -> EdgePlan:
        """Producer-consumer edges between the roles."""
        queries = Edge("q", "load", "mma", 1, Signal.TMA, "queries", freed_by="exit",
                       tx_bytes=self.row_bytes * self.n)  # fmt: skip
        keys = Edge("keys", "load", "mma", STAGES, Signal.TMA, "tile of keys",
                    tx_bytes=self.row_bytes * KEYS, release=Signal.UMMA)  # fmt: skip
        scales = Edge("scales", "scales", "mma", STAGES, Signal.THREADS, "scale factors of keys",
                      release=Signal.UMMA)  # fmt: skip
        acc = Edge("acc", "mma", "epilogue", ACC_STAGES, Signal.UMMA, "accumulator",
                   release=Signal.THREADS)  # fmt: skip
        return EdgePlan(ROLES, (queries, keys, scales, acc))

    def check(self) -> None:
        """Raise ValueError if the plan exceeds the limits of a CTA."""
        super().check()
        self.tmem.check()


def make_plan(config: BlockScaledConfig) -> ScoresPlan:
    """Make and check the plan of a config."""
    plan = ScoresPlan(config)
    plan.check()
    return plan
