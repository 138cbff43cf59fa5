"""AttentionConfig -> roles and barriers of the Blackwell kernel. Plain data.

There are two schedules: twelve warps for one query tile, or sixteen for two (ping-pong).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fmha.config import AttentionConfig
from fmha.plan import AttentionPlan
from fmha.sm100.layout import Layout
from kernelkit.plan import hw
from kernelkit.plan.barriers import BarrierPlan, NamedBarrier
from kernelkit.plan.edges import Edge, EdgePlan, Signal
from kernelkit.plan.tmem import TmemPlan
from kernelkit.plan.warps import Role, RolePlan


@dataclass(frozen=True)
class Plan(AttentionPlan):
    """Plan of the Blackwell kernel."""

    layout: Layout
    tmem: TmemPlan
    barriers: BarrierPlan

    def check(self) -> None:
        super().check()
        self.barriers.check()
        self.tmem.check()


def plan_unchecked(config: AttentionConfig, arch: str) -> Plan:
    """The plan of `config`, see `fmha.plan`."""
    layout = Layout(config, arch)
    roles = _roles(layout)
    edges = EdgePlan(roles, _edges(config, layout), layout.ctas)
    smem = layout.smem(edges.barrier_bytes)
    barriers = BarrierPlan(roles, _barriers(layout, roles))
    return Plan(config, layout, roles, edges, smem, layout.tmem, barriers)


# Number of query tiles -> registers of a thread of softmax, of correction, of issuing warps.
REGISTERS = {1: (232, 168, 104), 2: (192, 80, 48)}


def _roles(layout: Layout) -> RolePlan:
    # Whole warpgroups: issuing warps give registers to computing ones.
    teams = layout.q_tiles
    scores, corrects, issues = REGISTERS[teams]
    first = 4 * teams
    return RolePlan(
        (
            Role("softmax", 0, first, "S -> P, row statistics: one row per thread", scores, teams),
            Role("correction", first, 4, "rescale and convert O: one row per thread", corrects),
            Role("mma", first + 4, 1, "S = Q K^T and O += P V on the tensor core", issues),
            Role("load_qk", first + 5, 1, "load Q and pieces of K by TMA", issues),
            Role("load_v", first + 6, 1, "load pieces of V by TMA", issues),
            Role("store", first + 7, 1, "store panels of O by TMA", issues),
        )
    )


def _barriers(layout: Layout, roles: RolePlan) -> tuple[NamedBarrier, ...]:
    softmax, correction = ("softmax",), ("correction",)
    found = [
        NamedBarrier(
            "read", correction, roles["correction"].threads,
            "all rows of O are read: tensor memory may be freed",
        )
    ]  # fmt: skip
    if layout.halves == 2:
        found.append(
            NamedBarrier(
                "halves", softmax, 2 * hw.WARP_THREADS, "both halves of 32 rows stored a number",
                count=layout.rows // hw.WARP_THREADS,
            )
        )  # fmt: skip
    if layout.config.q_terms > 1:
        found.append(
            NamedBarrier(
                "q_read", softmax, layout.rows, "a Q tile is in registers: terms may replace it",
                count=layout.q_tiles,
            )
        )  # fmt: skip
    return tuple(found)


def _edges(config: AttentionConfig, layout: Layout) -> tuple[Edge, ...]:
    """Return the edges: which role waits for which.

    A buffer of O alternates: the MMA warp adds to it, the correction warps rescale or read it.
    """
    q_tiles = layout.q_tiles
    k_stages, v_stages = layout.stages
    ring: dict[str, Any] = {"signal": Signal.TMA, "release": Signal.UMMA}
    told: dict[str, Any] = {"signal": Signal.THREADS, "release": Signal.THREADS}
    edges = [
        _q_edge(config, layout),
        Edge("k", "load_qk", "mma", k_stages, payload="K piece", tx_bytes=layout.k_bytes, **ring),
        Edge("v", "load_v", "mma", v_stages, payload="V piece", tx_bytes=layout.v_bytes, **ring),
        Edge("s", "mma", "softmax", layout.s_stages, Signal.UMMA, "S tile", freed_by="p"),
        Edge("p", "softmax", "mma", layout.s_stages, Signal.THREADS, "P tile", freed_by="s"),
        Edge(
            "o", "mma", "correction", q_tiles, Signal.UMMA, "O with P V added",
            release=Signal.THREADS,
        ),
        Edge(
            "row", "softmax", "correction", q_tiles, payload="acc_scale; row_sum, row_max", **told
        ),
        Edge("out", "correction", "store", layout.out_stages, payload="O panel", **told),
    ]  # fmt: skip
    if len(layout.p_columns) > 1:
        edges.append(
            Edge(
                "p_tail", "softmax", "mma", layout.s_stages, Signal.THREADS, "last columns of P",
                freed_by="s",
            )
        )  # fmt: skip
    if config.ragged_keys:
        # The correction zeroes V rows past a length, so this edge ends there and not at the MMA.
        tail_bytes = layout.v_pieces * layout.v_bytes
        edges.append(
            Edge(
                "tail", "load_v", "correction", 1, Signal.TMA, "first V tile", tail_bytes,
                release=Signal.THREADS,
            )
        )  # fmt: skip
    if config.q_terms > 1:
        edges.append(
            Edge("terms", "softmax", "mma", q_tiles, Signal.THREADS, "terms of Q", freed_by="q")
        )
    return tuple(edges)


def _q_edge(config: AttentionConfig, layout: Layout) -> Edge:
    """Return the edge of Q from TMA to its consumer: the MMA, or the softmax that splits Q into
    terms.
    """
    splits = config.q_terms > 1
    return Edge(
        "q", "load_qk", "softmax" if splits else "mma", layout.q_tiles, Signal.TMA, "Q tile",
        layout.q_box_bytes, Signal.UMMA, released_by="mma" if splits else "",
    )  # fmt: skip
