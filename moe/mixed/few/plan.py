"""Warps, barriers and shared memory of the launch for few rows, as data.

Every CTA has a share of the rows of weights of each product, of whichever experts are chosen. It
goes through them in chunks: 64 rows of an expert, all of K. With a smaller granule CTAs share
chunks, too: a part of one costs as many rounds, with fewer bytes in flight. A chunk has rounds, in
which each warp multiplies one unit of K; a stage of the ring has a round. Two warps fill
the ring, one with weights and one with rows of tokens: weights of the second product arrive while h
is not there yet. Sums of all warps meet in shared memory, where four other warps add them up in a
fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kernelkit.plan import hw
from kernelkit.plan.barriers import BarrierPlan, NamedBarrier
from kernelkit.plan.smem import SmemBuffer, SmemPlan
from kernelkit.plan.warps import Role, RolePlan
from moe.mixed.few.config import (
    GROUP_ROWS,
    GROUPS,
    ITEM_ROWS,
    MOST_EXPERTS,
    MOST_ROWS,
    FewConfig,
)
from moe.mixed.fragments import DEPTH, ELEMENT_BYTES, unit_bytes

CHUNK_BYTES = 16  # that a thread copies at a time
SUM_BYTES = GROUP_ROWS * ITEM_ROWS * 4  # of a group
BLOCK_COLUMNS = GROUPS * GROUP_ROWS  # columns of the result that are finished together


@dataclass(frozen=True)
class FewPlan:
    """Properties of a config that are decided before tracing."""

    config: FewConfig

    @cached_property
    def roles(self) -> RolePlan:
        """Warps of a CTA."""
        warps = self.config.warps
        return RolePlan((
            Role("math", 0, warps, "convert weights to bf16, products"),
            Role("finish", warps, GROUPS, "add up sums; SwiGLU, h, y, the weighted sum"),
            Role("weights", warps + GROUPS, 1, "load weights as stored"),
            Role("rows", warps + GROUPS + 1, 1, "load rows of x and of h"),
        ))  # fmt: skip

    @cached_property
    def barriers(self) -> BarrierPlan:
        """Named barriers."""
        finish = self.roles["finish"].threads
        every = tuple(role.name for role in self.roles.roles)
        return BarrierPlan(
            self.roles,
            (
                NamedBarrier("finish", ("finish",), finish, "all rows of a step are stored"),
                NamedBarrier("items", every, self.roles.threads, "the tables of items are there"),
            ),
        )

    @property
    def unit_bytes(self) -> int:
        """Bytes of 64 rows of weights by 64 of K."""
        return unit_bytes(self.config.fmt)

    @property
    def group_bytes(self) -> int:
        """Bytes of a group's elements in a unit."""
        return ELEMENT_BYTES // GROUPS

    @property
    def scale_bytes(self) -> int:
        """Bytes of a group's scale factors in a unit."""
        return GROUP_ROWS * DEPTH // self.config.format.block

    @property
    def row_stride(self) -> int:
        """Bytes between rows of a stage: eight rows at the same column use all banks."""
        return self.config.warps * DEPTH * 2 + CHUNK_BYTES

    @property
    def w_bytes(self) -> int:
        """Bytes of weights of a stage."""
        return self.config.warps * self.unit_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of rows of a stage."""
        return ITEM_ROWS * self.row_stride

    @property
    def weight_arrivals(self) -> int:
        """Arrivals when the weights of a stage are there: of one thread if all are bulk copies,
        else of all lanes."""
        return 1 if self.config.granule == GROUPS else hw.WARP_THREADS

    def rounds(self, phase: int) -> int:
        """Rounds of a chunk of a product."""
        return -(-self.config.units(phase) // self.config.warps)

    @property
    def boxes(self) -> int:
        """Number of mbarriers: of every stage for its weights, its rows, and its release; then
        `sums_full`, `sums_free` and `h_ready`."""
        return 3 * self.config.stages + 3

    @cached_property
    def smem(self) -> SmemPlan:
        """Shared memory of a CTA."""
        config = self.config
        return SmemPlan(
            (
                SmemBuffer("ring", self.w_bytes, config.stages, align=128),
                SmemBuffer("rows", self.row_bytes, config.stages, align=128),
                SmemBuffer("sums", GROUPS * SUM_BYTES, config.warps, align=128),
                SmemBuffer("mbarriers", hw.MBARRIER_BYTES, self.boxes, align=16),
                SmemBuffer("slots", 4 * ITEM_ROWS, MOST_ROWS, align=16),
                SmemBuffer("items", 4, MOST_ROWS, align=16),
                SmemBuffer("counts", 4, MOST_EXPERTS, align=16),
                SmemBuffer("words", 4, 4, align=16),
            )
        )

    def check(self) -> None:
        """Raise ValueError if a CTA cannot hold the plan."""
        self.roles.check()
        self.barriers.check()
        self.smem.check()


def make_plan(config: FewConfig) -> FewPlan:
    """The checked plan of a config."""
    config.check_values()
    plan = FewPlan(config)
    plan.check()
    return plan
