"""Common parts of the plans of the mixed product: sizes of a stage, edges of tiles, the output.

A tile is tile_rows rows of one expert by tile_n rows of its matrix. A product multiplies 64 rows of
weights, converted to bf16, by all rows of the expert: the result is transposed. A stage of the ring
has one unit of K, or two.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from kernelkit.plan.edges import Edge, EdgePlan, Signal
from kernelkit.plan.smem import SmemPlan
from kernelkit.plan.warps import RolePlan
from moe.mixed.config import BITS, ROWS, MixedConfig
from moe.mixed.fragments import DEPTH, unit_bytes
from moe.sm100.plan import TILE_STAGES  # same scheduler

PAIR = 2  # units of K of a stage with few rows of x
TILE_WORDS = 8  # int32 of a slot of the tile queue
BARRIER_BYTES = 1024
MAX_STAGES = 16
MAX_AHEAD = 5
CHUNK = 32  # rows of the output that a warpgroup has in shared memory at a time
STORE_BARRIER = 1  # first named barrier of the storing warpgroups


@dataclass(frozen=True)
class ProductPlan:
    """Properties decided before tracing, for any architecture.

    A plan adds `roles`, `widths`, `stages`, `lag`, `smem` and `edges`. It also adds `parts`, the
    times 64 rows of weights that a warpgroup stores, and `outputs`, the number of their output
    columns.
    """

    config: MixedConfig
    small_bytes: ClassVar[int] = 4096  # most bytes of x in a unit, for two units in a stage

    @property
    def units(self) -> int:
        """Units of K in a stage: one if a unit is large."""
        return PAIR if self.x_bytes <= self.small_bytes else 1

    @property
    def unit_bytes(self) -> int:
        """Bytes of 64 rows of weights by 64 of K."""
        return unit_bytes(self.config.fmt)

    @property
    def tall(self) -> int:
        """64 rows of weights in a tile."""
        return self.config.tile_n // ROWS

    @property
    def w_bytes(self) -> int:
        """Bytes of weights in a stage."""
        return self.tall * self.units * self.unit_bytes

    @property
    def x_bytes(self) -> int:
        """Bytes of x in one unit of K of a stage."""
        return self.config.tile_rows * self.line

    @property
    def line(self) -> int:
        """Bytes of a row of x in a unit of K."""
        return DEPTH * self.config.x_bits // 8

    @property
    def moved_x(self) -> int:
        """Bytes of a stage of x that TMA brings."""
        return 0 if self.config.gather else self.units * self.x_bytes

    @property
    def outputs(self) -> int:
        """Columns of the output of a warpgroup that stores."""
        raise NotImplementedError

    @property
    def out_line(self) -> int:
        """Bytes of a row of them."""
        return self.outputs * BITS[self.config.out] // 8

    @property
    def out_bytes(self) -> int:
        """Bytes of an output buffer in shared memory. A warpgroup has two."""
        return min(CHUNK, self.config.tile_rows) * self.out_line

    @property
    def stages(self) -> int:
        """Stages of the ring."""
        raise NotImplementedError

    @property
    def lag(self) -> int:
        """Number of further stages that have to be full before a stage is released."""
        raise NotImplementedError

    @property
    def ahead(self) -> int:
        """Stages of gathered rows in flight; more would deadlock, see `lag`."""
        return min(MAX_AHEAD, self.stages - self.lag - 1)

    @cached_property
    def roles(self) -> RolePlan:
        """Warps of a CTA."""
        raise NotImplementedError

    @cached_property
    def edges(self) -> EdgePlan:
        """Edges between producers and consumers."""
        raise NotImplementedError

    @cached_property
    def smem(self) -> SmemPlan:
        """Shared memory of a CTA."""
        raise NotImplementedError

    def tile_edges(self, *readers: str) -> tuple[Edge, ...]:
        """Return the tile edges. Each role that needs tiles has a separate one."""
        readers += ("gather",) * self.config.gather
        threads = Signal.THREADS
        return tuple(
            Edge(f"tile_{role}", "scheduler", role, TILE_STAGES, threads, "tile", release=threads,
                 every_team=True)
            for role in readers
        )  # fmt: skip

    @property
    def tile_names(self) -> tuple[str, ...]:
        """Edges of tiles."""
        names = (edge.name for edge in self.edges.edges)
        return tuple(name for name in names if name.startswith("tile_"))

    def check(self) -> None:
        """Raise ValueError if a CTA cannot hold the plan."""
        self.roles.check()
        least = self.lag + (2 if self.config.gather else 1)
        if self.stages < least:
            raise ValueError(f"{self.stages} stages of {self.config}: at least {least}")
        self.edges.check()
        self.smem.check()
        if self.edges.barrier_bytes > BARRIER_BYTES:
            raise ValueError(
                f"{self.edges.barrier_bytes} bytes of mbarriers, limit {BARRIER_BYTES}"
            )
