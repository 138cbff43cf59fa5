"""AttentionConfig -> who works, where everything lies, who waits for whom. Plain data.

`sm100/kernel.py` allocates and dispatches by this plan; `scripts/explain.py` and the README print
it. Reading order: roles (warps), edges (mbarriers), then `fmha/layout.py`: shared memory and tensor
memory. There are two schedules: six warps for one query tile, or sixteen for two (ping-pong).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fmha.config import AttentionConfig
from fmha.layout import S_STAGES, Layout
from kernelkit.arrivals import Signal
from kernelkit.edges import Edge, EdgePlan
from kernelkit.smem_plan import SmemPlan
from kernelkit.tmem_plan import TmemPlan
from kernelkit.warps import Role, RolePlan

# Named barriers; 0 is that of the whole CTA.
FREE_BARRIER = 1  # who corrects O: all its rows have been read, tensor memory can be freed
HALVES_BARRIER = 2  # and 3: in a CTA pair, two softmax warps with the two halves of 32 rows


@dataclass(frozen=True)
class AttentionPlan:
    """Everything that is decided before tracing."""

    config: AttentionConfig
    layout: Layout
    roles: RolePlan
    edges: EdgePlan
    smem: SmemPlan
    tmem: TmemPlan

    def check(self) -> None:
        """Raise for a plan that cannot run; every part names its own value and limit."""
        self.layout.check()
        self.roles.check()
        self.edges.check()
        self.smem.check()
        self.tmem.check()


def make_plan(config: AttentionConfig) -> AttentionPlan:
    """The plan of `config`, checked."""
    config.check_values()
    plan = plan_unchecked(config)
    plan.check()
    return plan


def plan_unchecked(config: AttentionConfig) -> AttentionPlan:
    """The same without a check: what the compiler, ptxas and the launch would refuse themselves."""
    layout, roles = Layout(config), _pingpong_roles() if config.q_tiles == 2 else _base_roles()
    edges = EdgePlan(roles, _edges(config, layout), config.ctas)
    smem = layout.smem(edges.barrier_bytes)
    return AttentionPlan(config, layout, roles, edges, smem, layout.tmem)


def _base_roles() -> RolePlan:
    # 192 threads hold no second whole warpgroup, so no registers are moved (setmaxnreg):
    # 65536 / 192 leaves every thread the full 255.
    return RolePlan(
        (
            Role("softmax", 0, 4, "S -> P, row statistics, rescale and convert O: a row a thread"),
            Role("mma", 4, 1, "S = Q K^T and O += P V on the tensor core"),
            Role("load", 5, 1, "Q, K, V pieces by TMA, and the store of O"),
        )
    )


def _pingpong_roles() -> RolePlan:
    # Four whole warpgroups: registers move from those that issue to those that compute.
    return RolePlan(
        (
            Role("softmax", 0, 8, "S -> P, row statistics: a row a thread", 192, teams=2),
            Role("correction", 8, 4, "rescale and convert O: a row a thread", 72),
            Role("mma", 12, 1, "S = Q K^T and O += P V on the tensor core", 56),
            Role("load", 13, 1, "Q, K, V pieces by TMA, and the store of O", 56),
            Role("idle", 14, 2, "complete the warpgroup", 56),
        )
    )


def _edges(config: AttentionConfig, layout: Layout) -> tuple[Edge, ...]:
    """Who waits for whom. The softmax warps send Q where they gather packed rows, else TMA does.

    O has one owner, who rescales and stores it: the softmax warps, in the ping-pong schedule the
    correction warps. P tells that O is rescaled in the former, `rescaled` does in the latter.
    """
    q_tiles = config.q_tiles
    owner, rescaled = ("correction", "rescaled") if q_tiles == 2 else ("softmax", "p")
    k_stages, v_stages = layout.stages
    ring: dict[str, Any] = {"signal": Signal.TMA, "release": Signal.UMMA}
    once: dict[str, Any] = {"freed_by": "exit"}
    edges = [
        Edge("q", "softmax", "mma", q_tiles, Signal.THREADS, "Q rows, packed", **once)
        if config.pack_heads
        else Edge("q", "load", "mma", q_tiles, Signal.TMA, "Q tile", layout.q_bytes, **once),
        Edge("k", "load", "mma", k_stages, payload="K piece", tx_bytes=layout.k_bytes, **ring),
        Edge("v", "load", "mma", v_stages, payload="V piece", tx_bytes=layout.v_bytes, **ring),
        Edge("s", "mma", "softmax", S_STAGES, Signal.UMMA, "S tile", freed_by="p"),
        Edge("p", "softmax", "mma", S_STAGES, Signal.THREADS, "P tile", freed_by="s"),
        Edge("o", "mma", owner, q_tiles, Signal.UMMA, "O with P V added", freed_by=rescaled),
    ]
    if q_tiles == 2:
        both: dict[str, Any] = {"signal": Signal.THREADS, "release": Signal.THREADS}
        edges += [
            Edge("rescaled", owner, "mma", q_tiles, Signal.THREADS, "O to add to", freed_by="o"),
            Edge("row", "softmax", owner, q_tiles, payload="acc_scale; row_sum, row_max", **both),
        ]
    if config.ragged_keys:
        # Who corrects O zeroes rows past a length in it, so it signals them, not the MMA warp.
        tail_bytes = layout.v_pieces * layout.v_bytes
        edges.append(Edge("tail", "load", owner, 1, Signal.TMA, "first V tile", tail_bytes, **once))
    if not config.pack_heads:
        pieces = q_tiles * layout.v_pieces
        edges.append(Edge("out", owner, "load", pieces, Signal.THREADS, "O piece", **once))
    return tuple(edges)
