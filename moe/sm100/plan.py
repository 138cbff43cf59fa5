"""Warps, barriers, shared memory and tensor memory of the grouped GEMM, as data.

A tile is tile_rows rows of one expert by tile_n rows of its matrix. `config.swapped` decides which
of the two is the M of the MMA; M is 128 in every CTA. A stage of the ring holds 128 bytes of K of
both. Scale factors come in atoms of 128 rows by four scale factors, 512 bytes. They are copied to
tensor memory in the layout of global memory, and the MMA reads them there. Scale factors of a few
stages are fetched together, into a separate ring, since every TMA instruction has a cost. Each CTA
of a pair holds half of the rows of both, the scale factors of its half of x, and all of w's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kernelkit.plan import hw
from kernelkit.plan.edges import Edge, EdgePlan, Signal
from kernelkit.plan.smem import SmemBuffer, SmemPlan
from kernelkit.plan.tmem import TmemPlan, TmemRange
from kernelkit.plan.warps import Role, RolePlan
from moe.config import PART, WINDOW_STEP, GroupedConfig
from moe.formats import SCALE_ATOM_BYTES, SCALE_COLUMNS, SCALE_ROWS

LANES = 128  # rows of a CTA's accumulator, and threads of the epilogue
LINE = hw.SMEM_LINE_BYTES  # bytes of K in a stage
K_BLOCKS = 4  # MMAs of a stage, 32 bytes of K each
TILE_STAGES = 2
TILE_WORDS = 8  # int32 of a slot of the tile queue
MAX_STAGES = 8
GROUP_ATOMS = 4
BARRIER_BYTES = 512
PIECE_BYTES = 64  # bytes of a row of the output that a warp stores together
PAD = 4  # fp32 after a row of the transposed accumulator: columns use all banks
# Columns: accumulators of 256 that share columns begin at multiples of this. The manual has no
# rule; no kernel known to run on hardware uses a smaller multiple for this size.
ACC_ALIGN = 16

ROLES = RolePlan(
    (
        Role("epilogue", 0, 4, "global scale, SwiGLU, output: one row per thread"),
        Role("mma", 4, 1, "scale factors to tensor memory, then D += A B on the tensor core"),
        Role("load", 5, 1, "load x, w and their scale factors by TMA"),
        Role("scheduler", 6, 1, "assign tiles, from offsets on the device"),
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
        """Bits of an element of x and w in shared memory. With e4m3, the MMA reads e2m1 from bytes,
        too."""
        return 4 if self.config.x_format.element == "e2m1" else 8

    @property
    def tails(self) -> tuple[int, ...]:
        """MMAs that the last stage of K may have, if not all."""
        if self.pads_w:
            return (WINDOW_STEP // self.k_block,)
        return (*range(1, K_BLOCKS),)

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
        """Atoms along K in a stage."""
        return K_BLOCKS * self.scales_of_block // SCALE_COLUMNS

    @property
    def m(self) -> int:
        """M of an MMA: rows of both CTAs of a pair."""
        return LANES * self.config.ctas

    @property
    def n(self) -> int:
        """N of an MMA: columns of an accumulator."""
        return self.config.tile_rows if self.config.swapped else self.config.tile_n

    @property
    def x_rows(self) -> int:
        """Number of rows of x that a CTA loads."""
        return self.config.tile_rows // self.config.ctas

    @property
    def w_rows(self) -> int:
        """Number of rows of w that a CTA loads."""
        return self.config.tile_n // self.config.ctas

    @property
    def w_blocks(self) -> int:
        """Number of 128-row blocks of scale factors of w in a tile."""
        return self.config.tile_n // SCALE_ROWS

    @property
    def x_scale_bytes(self) -> int:
        """Bytes of scale factors of x in a stage."""
        return self.atoms * SCALE_ATOM_BYTES

    @property
    def w_scale_bytes(self) -> int:
        """Bytes of scale factors of w in a stage."""
        return self.w_blocks * self.atoms * SCALE_ATOM_BYTES

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage in one CTA."""
        return (self.x_rows + self.w_rows) * LINE + self.x_scale_bytes + self.w_scale_bytes

    @property
    def pads_w(self) -> bool:
        """Whether 16 elements of w, 8 bytes, are padded to 16 in shared memory."""
        return bool(self.config.x_fmt)

    @property
    def moved_bytes(self) -> int:
        """Bytes of x and w that TMA counts for one stage in one CTA, without padding."""
        return (self.x_rows + self.w_rows) * LINE - self.w_rows * LINE // 2 * self.pads_w

    @property
    def group_bytes(self) -> int:
        """Bytes of scale factors that are fetched together."""
        return self.group * (self.x_scale_bytes + self.w_scale_bytes)

    @property
    def passed(self) -> SmemBuffer:
        """Shared-memory buffer of the output: a transposed accumulator (one row of x after the
        other), or pieces of rows of the output."""
        if self.config.swapped:
            return SmemBuffer("transposed", 4 * self.n * (LANES + PAD), align=128)
        return SmemBuffer("pieces", LANES * PIECE_BYTES, align=128)

    @cached_property
    def stages(self) -> int:
        """Stages of the ring: as many as shared memory holds."""
        return min(MAX_STAGES, self.room // self.stage_bytes)

    @property
    def room(self) -> int:
        """Bytes of shared memory for the rings."""
        fixed = BARRIER_BYTES + 2 * hw.SMEM_SWIZZLE_ALIGN + self.passed.bytes
        return hw.SMEM_BYTES_PER_CTA - fixed

    @cached_property
    def group(self) -> int:
        """Stages whose scale factors are fetched together: up to four atoms, as far as there is
        room."""
        lines = (self.x_rows + self.w_rows) * LINE * self.stages
        scales = self.x_scale_bytes + self.w_scale_bytes
        for size in (4, 2):
            bytes_of_rings = lines + (self.stages + 1) * size * scales
            if size * self.atoms <= GROUP_ATOMS and bytes_of_rings <= self.room:
                return size
        return 1

    @property
    def groups(self) -> int:
        """Stages of the ring of scale factors. A tile begins with a new group, so each stage may be
        of another group. If groups have several stages, there is one more: the last stages of an
        overwritten group may still be multiplied when its first stage is free."""
        return self.stages + (self.group > 1)

    @cached_property
    def smem(self) -> SmemPlan:
        """Shared memory of a CTA, in the order of allocation."""
        return SmemPlan(
            (
                SmemBuffer("barriers", BARRIER_BYTES, align=hw.MBARRIER_BYTES),
                SmemBuffer("tmem_base", 4, align=4),
                SmemBuffer("tiles", 4 * TILE_WORDS, TILE_STAGES, align=16),
                SmemBuffer("x", self.x_rows * LINE, self.stages),
                SmemBuffer("w", self.w_rows * LINE, self.stages),
                SmemBuffer("x_scales", self.group * self.x_scale_bytes, self.groups, align=128),
                SmemBuffer("w_scales", self.group * self.w_scale_bytes, self.groups, align=128),
                self.passed,
            )
        )

    @property
    def parts(self) -> int:
        """Parts of an accumulator that the epilogue processes one after the other."""
        return max(1, self.n // PART)

    @property
    def shares_columns(self) -> bool:
        """Whether two accumulators and the scale factors exceed tensor memory. Then the last
        columns of the first accumulator are the first ones of the second."""
        return 2 * self.n + self.scale_columns > hw.TMEM_COLUMNS

    @property
    def scale_columns(self) -> int:
        """Columns of tensor memory for the scale factors of a stage."""
        return (1 + self.w_blocks) * self.atoms * SCALE_COLUMNS

    @property
    def second(self) -> int:
        """First column of the second accumulator. If accumulators share columns, it is the last
        column that leaves room for the second and for the scale factors."""
        if not self.shares_columns:
            return self.n
        last = hw.TMEM_COLUMNS - self.scale_columns - self.n
        return last // ACC_ALIGN * ACC_ALIGN

    @property
    def acc_stages(self) -> int:
        """Accumulators that may be full at once: one if they share columns. It is released once the
        shared columns have been read."""
        return 1 if self.shares_columns else 2

    @cached_property
    def tmem(self) -> TmemPlan:
        """Two alternating accumulators, and the scale factors of one stage."""
        columns, shared = self.atoms * SCALE_COLUMNS, self.n - self.second
        x_scales = self.second + self.n
        begin = TmemRange("acc1_begin", self.second, shared, "first columns of acc1", over="acc0")
        return TmemPlan(
            (
                TmemRange("acc0", 0, self.n, "accumulator, fp32"),
                *((begin,) if shared else ()),
                TmemRange("acc1", self.n, self.n - shared, "accumulator, fp32"),
                TmemRange("x_scales", x_scales, columns, "scale factors of x"),
                TmemRange(
                    "w_scales", x_scales + columns, self.w_blocks * columns, "scale factors of w"
                ),
            )
        )

    @cached_property
    def edges(self) -> EdgePlan:
        """Edges between producers and consumers. Each role that needs tiles has a separate tile
        edge."""
        threads = {"signal": Signal.THREADS, "release": Signal.THREADS, "payload": "tile"}
        tiles = tuple(
            Edge(f"tile_{role}", "scheduler", role, TILE_STAGES, leader_only=role == "mma",
                 **threads)
            for role in ("load", "mma", "epilogue")
        )  # fmt: skip
        ring = Edge("ab", "load", "mma", self.stages, Signal.TMA, "stage of x, w and scales",
                    tx_bytes=self.moved_bytes + self.group_bytes, release=Signal.UMMA)  # fmt: skip
        accumulator = Edge("acc", "mma", "epilogue", self.acc_stages, Signal.UMMA, "accumulator",
                           release=Signal.THREADS)  # fmt: skip
        return EdgePlan(ROLES, (*tiles, ring, accumulator), self.config.ctas)

    def check(self) -> None:
        """Raise ValueError if a CTA cannot hold the plan."""
        ROLES.check()
        self.edges.check()
        self.smem.check()
        self.tmem.check()
        if self.edges.barrier_bytes > BARRIER_BYTES:
            raise ValueError(
                f"{self.edges.barrier_bytes} bytes of mbarriers, limit {BARRIER_BYTES}"
            )


def make_plan(config: GroupedConfig) -> GroupedPlan:
    """The checked plan of a config."""
    config.check_values()
    plan = GroupedPlan(config)
    plan.check()
    return plan
