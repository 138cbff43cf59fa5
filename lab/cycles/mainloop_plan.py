"""The main loop of a GEMM in one CTA, as data: roles of warps, their waits, and memory layout."""

from __future__ import annotations

from dataclasses import dataclass

from kernelkit.plan import hw
from kernelkit.plan.dtypes import ITEM_BYTES
from kernelkit.plan.edges import Edge, EdgePlan, Signal
from kernelkit.plan.smem import SmemBuffer, SmemPlan
from kernelkit.plan.tmem import TmemPlan, TmemRange
from kernelkit.plan.warps import Role, RolePlan

MOST_STAGES = 16  # of narrow tiles; more do not help, since even these wait for TMA
OTHERS = 1024  # bytes of shared memory that are not for stages
ROLES = RolePlan(
    (
        Role("epilogue", 0, 4, "D from tensor memory to global memory"),
        Role("mma", 4, 1, "D += A B, a step of K at a time"),
        Role("load", 5, 1, "A and B by TMA"),
    )
)


@dataclass(frozen=True)
class MainloopConfig:
    """D[m, n] = A[m, K] B[n, K]^T in steps of k; dtype: 'bf16' or 'e4m3'."""

    m: int
    n: int
    k: int
    dtype: str

    def __post_init__(self) -> None:
        if self.m not in (64, 128):
            raise ValueError(f"m={self.m}: 64 or 128")
        if self.n % 16 or not 16 <= self.n <= 256:
            raise ValueError(f"n={self.n}: a multiple of 16 from 16 to 256")
        if self.dtype not in ("bf16", "e4m3"):
            raise ValueError(f"dtype={self.dtype!r}: 'bf16' or 'e4m3'")
        if self.row_bytes not in (32, 64, 128) and self.row_bytes % 128:
            raise ValueError(f"k={self.k}: rows of {self.row_bytes} bytes, not 32, 64 or 128 n")
        if self.stages < 2:
            raise ValueError(f"{self.stages} stages of {self.stage_bytes} bytes fit, at least 2")

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of a stage."""
        return self.k * ITEM_BYTES[self.dtype]

    @property
    def stage_bytes(self) -> int:
        """Bytes of A and of B."""
        return (self.m + self.n) * self.row_bytes

    @property
    def stages(self) -> int:
        """Stages that shared memory holds, at most `MOST_STAGES`."""
        return min((hw.SMEM_BYTES_PER_CTA - OTHERS) // self.stage_bytes, MOST_STAGES)


class MainloopPlan:
    """Plan of a config."""

    def __init__(self, config: MainloopConfig) -> None:
        self.config, self.roles = config, ROLES
        ring = {"signal": Signal.TMA, "release": Signal.UMMA, "tx_bytes": config.stage_bytes}
        self.edges = EdgePlan(
            ROLES,
            (
                Edge("ab", "load", "mma", config.stages, payload="a step of A and of B", **ring),
                Edge("d", "mma", "epilogue", 1, Signal.UMMA, "D", freed_by="exit"),
            ),
        )
        self.smem = SmemPlan(
            (
                SmemBuffer("barriers", self.edges.barrier_bytes, align=hw.MBARRIER_BYTES),
                SmemBuffer("tmem_base", 4, align=4),
                SmemBuffer("sA", config.m * config.row_bytes, config.stages),
                SmemBuffer("sB", config.n * config.row_bytes, config.stages),
            )
        )
        self.tmem = TmemPlan((TmemRange("D", 0, config.n, "the sum, fp32"),))
        for part in (self.roles, self.edges, self.smem, self.tmem):
            part.check()
