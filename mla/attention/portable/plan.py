"""Warps, tiles and shared memory of the mma.sync kernel, as data.

A CTA has 16 or 32 query rows and walks over tiles of 32 keys. Eight warps divide each step:

- Scores: four slices of the columns of K, times two halves: of the rows if there are 32, else of
  the keys. A warp keeps its slice of Q in registers. The sums of four slices meet in shared memory.
- Softmax: each warp has some rows, each lane one key.
- O: each warp has all rows and 64 of the 512 columns, in registers.

Plain bf16 caches are copied straight into two stages of keys. For other records there is one stage
of keys in bf16 and one of raw bytes, which the next tile fills meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kernelkit.compile.arch import WITHOUT_E4M3, require_pdl
from kernelkit.plan import hw
from kernelkit.plan.barriers import BarrierPlan, NamedBarrier
from kernelkit.plan.smem import SmemBuffer, SmemPlan
from kernelkit.plan.warps import Role, RolePlan
from mla.attention.config import LatentConfig
from mla.attention.formats import LATENT, Form

KEYS = 32  # of a tile: one for each lane of the softmax
WARPS = 8
SLICES = 4  # of the columns of K, each of whole steps of 16
BLOCK = 16  # rows, or columns of K, of one product
ROWS = (16, 32)  # query rows of a CTA
CHUNK = 16  # bytes of one copy, and of one row of ldmatrix
LANES_OF_KEY = 8  # lanes that copy one key
P_ROW_BYTES = 80  # 32 weights in bf16 and padding: eight rows cover all banks


@dataclass(frozen=True)
class PortablePlan:
    """Plan of the kernel for one config and architecture."""

    config: LatentConfig
    arch: str = "sm_80"

    @property
    def rows(self) -> int:
        """Query rows of a CTA."""
        return ROWS[self.config.heads * self.config.tokens > ROWS[0]]

    @property
    def row_blocks(self) -> int:
        """Blocks of 16 rows."""
        return self.rows // BLOCK

    @property
    def key_halves(self) -> int:
        """Parts of a tile's keys whose scores different warps compute."""
        return WARPS // SLICES // self.row_blocks

    @property
    def keys_of_warp(self) -> int:
        """Keys of a tile whose scores one warp computes."""
        return KEYS // self.key_halves

    @property
    def slice_steps(self) -> int:
        """Steps of 16 columns in a slice of K."""
        return self.config.columns // BLOCK // SLICES

    @property
    def rows_of_warp(self) -> int:
        """Rows of a warp in the softmax."""
        return self.rows // WARPS

    @property
    def columns_of_warp(self) -> int:
        """Columns of O of a warp."""
        return LATENT // WARPS

    @property
    def direct(self) -> bool:
        """Whether all keys are copied as they are, without a raw stage."""
        return all(keys.form.plain and not keys.form.code for keys in self.config.sources)

    @property
    def stages(self) -> int:
        """Stages of keys in bf16."""
        return 2 if self.direct else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of a key in bf16."""
        return self.config.columns * 2

    @property
    def raw_bytes(self) -> int:
        """Bytes of a raw key in shared memory, the longest of all sources."""
        return 0 if self.direct else max(raw_bytes(keys.form) for keys in self.config.sources)

    @property
    def threads(self) -> int:
        return WARPS * hw.WARP_THREADS

    @property
    def partial_words(self) -> int:
        """fp32 of one part in the workspace: O, then (maximum, sum) of each row."""
        return self.rows * (LATENT + 2)

    @cached_property
    def roles(self) -> RolePlan:
        """Roles: all warps have the same one."""
        return RolePlan((Role("attend", 0, WARPS, "S = Q K^T, softmax, O += P V"),))

    @cached_property
    def barriers(self) -> BarrierPlan:
        """Named barriers."""
        meaning = "a part's sums are in the workspace, or the number of parts is known"
        return BarrierPlan(
            self.roles, (NamedBarrier("finish", ("attend",), self.threads, meaning),)
        )

    @cached_property
    def smem(self) -> SmemPlan:
        """Shared memory."""
        return SmemPlan(
            (
                SmemBuffer("keys", KEYS * self.row_bytes, self.stages, align=128),
                SmemBuffer("raw", KEYS * self.raw_bytes, align=128),
                SmemBuffer("scores", self.rows * KEYS * 4, SLICES, align=128),
                SmemBuffer("weights", self.rows * P_ROW_BYTES, align=128),
                SmemBuffer("exists", KEYS * 4, 2, align=16),
                SmemBuffer("factors", self.rows * 4, align=16),
                SmemBuffer("statistics", self.rows * 8, align=16),
                SmemBuffer("arrived", 4, align=16),
            ),
            hw.smem_bytes_per_cta(self.arch),
        )

    def check(self) -> None:
        """Raise ValueError or NotImplementedError for what the kernel or the GPU lacks."""
        config = self.config
        if config.cluster != 1:
            raise NotImplementedError(
                f"cluster {config.cluster} on {self.arch}: 1; use `parts` to split keys over CTAs"
            )
        if config.pdl:
            require_pdl(self.arch)
        for keys in config.sources:
            if keys.form.code == "e4m3" and self.arch in WITHOUT_E4M3:
                raise NotImplementedError(
                    f"keys of {keys.record} on {self.arch}: the conversion of e4m3 needs compute "
                    "capability 8.9"
                )
        self.smem.check()
        self.barriers.check()


def raw_bytes(form: Form) -> int:
    """Return the bytes of a raw key in shared memory: its data, then scales that lie apart."""
    return -(-(form.data_bytes + form.scale_bytes) // CHUNK) * CHUNK


def make_plan(config: LatentConfig) -> PortablePlan:
    """Return the plan of a config, unchecked, by which reports name roles."""
    return PortablePlan(config)
