"""Warps, barriers, shared memory and tensor memory of the grouped GEMM, as data.

A tile is 128 rows of one expert by tile_n rows of its matrix. A stage of the ring holds 128 bytes
of K of both, and the scale factors that belong to them, in atoms: 128 rows by four scale factors,
512 bytes, as they lie in global memory, go to tensor memory, and are read there by the MMA.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kernelkit import hw
from kernelkit.arrivals import Signal
from kernelkit.edges import Edge, EdgePlan
from kernelkit.smem_plan import SmemBuffer, SmemPlan
from kernelkit.tmem_plan import TmemPlan, TmemRange
from kernelkit.warps import Role, RolePlan
from moe.config import GroupedConfig
from moe.formats import SCALE_ATOM_BYTES, SCALE_COLUMNS

TILE_M = 128  # rows of an expert: the M of the MMA, and a thread each in the epilogue
LINE = hw.SMEM_LINE_BYTES  # of K in a stage
K_BLOCKS = 4  # MMAs of a stage, 32 bytes of K each
ACC_STAGES = 2
TILE_STAGES = 2
TILE_WORDS = 8  # int32 of a slot of the tile queue
MAX_STAGES = 8
BARRIER_BYTES = 512

ROLES = RolePlan(
    (
        Role("epilogue", 0, 4, "global scale, SwiGLU, output: a row a thread"),
        Role("mma", 4, 1, "scale factors to tensor memory, then D += A B on the tensor core"),
        Role("load", 5, 1, "A, B and their scale factors by TMA"),
        Role("scheduler", 6, 1, "the walk over tiles, from offsets on the device"),
    )
)


@dataclass(frozen=True)
class GroupedPlan:
    """Everything about a config that is decided before tracing."""

    config: GroupedConfig

    @property
    def k_stage(self) -> int:
        """Elements of K in a stage."""
        return LINE * 8 // self.element_bits

    @property
    def element_bits(self) -> int:
        """Of A and B."""
        return 4 if self.config.format.element == "e2m1" else 8

    @property
    def k_block(self) -> int:
        """K of one MMA."""
        return self.k_stage // K_BLOCKS

    @property
    def scales_of_block(self) -> int:
        """Scale factors of a row in one MMA."""
        return self.k_block // self.config.format.block

    @property
    def atoms(self) -> int:
        """Along K, of a stage."""
        return K_BLOCKS * self.scales_of_block // SCALE_COLUMNS

    @property
    def b_blocks(self) -> int:
        """Atoms that the columns of a tile take."""
        return -(-self.config.tile_n // TILE_M)

    @property
    def sfa_bytes(self) -> int:
        """Of a stage."""
        return self.atoms * SCALE_ATOM_BYTES

    @property
    def sfb_bytes(self) -> int:
        """Of a stage."""
        return self.b_blocks * self.atoms * SCALE_ATOM_BYTES

    @property
    def stage_bytes(self) -> int:
        """That TMA brings for one stage."""
        return (TILE_M + self.config.tile_n) * LINE + self.sfa_bytes + self.sfb_bytes

    @cached_property
    def stages(self) -> int:
        """Of the ring: what shared memory holds."""
        room = hw.SMEM_BYTES_PER_CTA - BARRIER_BYTES - 2 * hw.SMEM_SWIZZLE_ALIGN
        return min(MAX_STAGES, room // self.stage_bytes)

    @cached_property
    def smem(self) -> SmemPlan:
        """Shared memory of a CTA, in the order of allocation."""
        return SmemPlan(
            (
                SmemBuffer("barriers", BARRIER_BYTES, align=hw.MBARRIER_BYTES),
                SmemBuffer("tmem_base", 4, align=4),
                SmemBuffer("tiles", 4 * TILE_WORDS, TILE_STAGES, align=16),
                SmemBuffer("sA", TILE_M * LINE, self.stages),
                SmemBuffer("sB", self.config.tile_n * LINE, self.stages),
                SmemBuffer("sSFA", self.sfa_bytes, self.stages, align=128),
                SmemBuffer("sSFB", self.sfb_bytes, self.stages, align=128),
            )
        )

    @cached_property
    def tmem(self) -> TmemPlan:
        """Accumulators in turn, and the scale factors of one stage."""
        n, columns = self.config.tile_n, self.atoms * SCALE_COLUMNS
        scales = ACC_STAGES * n
        return TmemPlan(
            (
                *(
                    TmemRange(f"acc{stage}", stage * n, n, "accumulator, fp32")
                    for stage in range(ACC_STAGES)
                ),
                TmemRange("sfa", scales, columns, "scale factors of A"),
                TmemRange("sfb", scales + columns, self.b_blocks * columns, "of B"),
            )
        )

    @cached_property
    def edges(self) -> EdgePlan:
        """Who waits for whom. Tiles go to each role that wants them by an edge of its own."""
        threads = {"signal": Signal.THREADS, "release": Signal.THREADS}
        tiles = tuple(
            Edge(f"tile_{role}", "scheduler", role, TILE_STAGES, payload="tile", **threads)
            for role in ("load", "mma", "epilogue")
        )
        ring = Edge("ab", "load", "mma", self.stages, Signal.TMA, "stage of A, B and scales",
                    tx_bytes=self.stage_bytes, release=Signal.UMMA)  # fmt: skip
        accumulator = Edge("acc", "mma", "epilogue", ACC_STAGES, Signal.UMMA, "accumulator",
                           release=Signal.THREADS)  # fmt: skip
        return EdgePlan(ROLES, (*tiles, ring, accumulator))

    def check(self) -> None:
        """Raise ValueError for what no CTA can hold."""
        ROLES.check()
        self.edges.check()
        self.smem.check()
        self.tmem.check()
        if self.edges.barrier_bytes > BARRIER_BYTES:
            raise ValueError(f"{self.edges.barrier_bytes} bytes of mbarriers > {BARRIER_BYTES}")


def make_plan(config: GroupedConfig) -> GroupedPlan:
    """The checked plan of a config."""
    config.check_values()
    plan = GroupedPlan(config)
    plan.check()
    return plan
