"""AttentionConfig -> who works, where everything lies, who waits for whom. Plain data.

The kernel walks over this plan; `scripts/explain.py` and the README print it. Reading order:
roles (warps), edges (mbarriers), shared memory, tensor memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from fmha.config import AttentionConfig
from kernelkit.arrivals import Signal
from kernelkit.edges import Edge, EdgePlan
from kernelkit.smem_plan import SmemBuffer, SmemPlan
from kernelkit.tmem_plan import TmemPlan, TmemRange
from kernelkit.warps import Role, RolePlan

S_STAGES = 2  # Q K^T of tile i + 1 runs under the softmax of tile i
TMEM_BASE_BYTES = 4  # what tcgen05.alloc writes


@dataclass(frozen=True)
class AttentionPlan:
    """Everything that is decided before tracing."""

    config: AttentionConfig
    roles: RolePlan
    edges: EdgePlan
    smem: SmemPlan
    tmem: TmemPlan

    def check(self) -> None:
        """Raise for a plan that cannot run; every part names its own value and limit."""
        self.config.check()
        self.roles.check()
        self.edges.check()
        self.smem.check()
        self.tmem.check()


def make_plan(config: AttentionConfig) -> AttentionPlan:
    """The six-warp base schedule of `config`, checked."""
    config.check()
    roles = _roles()
    edges = EdgePlan(roles, _edges(config))
    plan = AttentionPlan(config, roles, edges, _smem(config, edges), _tmem(config))
    plan.check()
    return plan


def _roles() -> RolePlan:
    # 192 threads hold no second whole warpgroup, so no registers are moved (setmaxnreg):
    # 65536 / 192 leaves every thread the full 255.
    return RolePlan(
        (
            Role("softmax", 0, 4, "S -> P, row statistics, rescale and store O: one row a thread"),
            Role("mma", 4, 1, "S = Q K^T and O += P V on the tensor core"),
            Role("load", 5, 1, "Q, K, V tiles by TMA"),
        )
    )


def _edges(config: AttentionConfig) -> tuple[Edge, ...]:
    q_bytes = config.tile_m * config.head_dim * config.io_bytes
    kv_bytes = config.tile_n * config.head_dim * config.io_bytes
    ring = {"stages": config.kv_stages, "tx_bytes": kv_bytes, "release": Signal.UMMA}
    return (
        Edge("q", "load", "mma", 1, Signal.TMA, "Q tile", q_bytes, freed_by="exit"),
        Edge("k", "load", "mma", signal=Signal.TMA, payload="K tile", **ring),
        Edge("v", "load", "mma", signal=Signal.TMA, payload="V tile", **ring),
        Edge("s", "mma", "softmax", S_STAGES, Signal.UMMA, "S tile", freed_by="p"),
        Edge("p", "softmax", "mma", S_STAGES, Signal.THREADS, "P tile, O rescaled", freed_by="s"),
        Edge("o", "mma", "softmax", 1, Signal.UMMA, "O with P V added", freed_by="p"),
    )


def _smem(config: AttentionConfig, edges: EdgePlan) -> SmemPlan:
    return SmemPlan(
        (
            SmemBuffer("barriers", edges.barrier_bytes, align=8),
            SmemBuffer("tmem_base", TMEM_BASE_BYTES, align=4),
            SmemBuffer("sQ", edges["q"].tx_bytes),
            SmemBuffer("sK", edges["k"].tx_bytes, config.kv_stages),
            SmemBuffer("sV", edges["v"].tx_bytes, config.kv_stages),
        )
    )


def _tmem(config: AttentionConfig) -> TmemPlan:
    # The softmax has S in registers when it writes P, so P may lie over S; at the tail of S it
    # leaves the head columns free for the row statistics of schedules that publish them.
    p_columns = config.tile_n * config.io_bytes // 4
    ranges = []
    for stage in range(S_STAGES):
        begin = stage * config.tile_n
        p_begin = begin + config.tile_n - p_columns
        ranges += [
            TmemRange(f"S{stage}", begin, config.tile_n, f"S, fp32, tiles {stage} mod {S_STAGES}"),
            TmemRange(
                f"P{stage}", p_begin, p_columns, f"P, {config.dtype}, same tile", f"S{stage}"
            ),
        ]
    ranges.append(TmemRange("O", S_STAGES * config.tile_n, config.head_dim, "O, fp32"))
    return TmemPlan(tuple(ranges))
