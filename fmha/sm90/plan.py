"""AttentionConfig -> roles and barriers of the Hopper kernel. Plain data.

Two or three warpgroups compute. Each has a query tile from S to O, or two share one: they process
its key tiles alternately and pass P to each other. One more warpgroup loads for them, and
transposes tiles of V in e4m3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fmha.config import AttentionConfig
from fmha.plan import AttentionPlan
from fmha.sm90.layout import VT_STAGES, Layout
from kernelkit.plan.barriers import BarrierPlan, NamedBarrier
from kernelkit.plan.edges import Edge, EdgePlan, Signal
from kernelkit.plan.warps import Role, RolePlan

MOST_TEAMS = 3  # most computing warpgroups


@dataclass(frozen=True)
class Plan90(AttentionPlan):
    """Plan of the Hopper kernel."""

    layout: Layout
    barriers: BarrierPlan

    def check(self) -> None:
        super().check()
        self.barriers.check()


def plan_unchecked(config: AttentionConfig, arch: str) -> Plan90:
    """The plan of `config`, see `fmha.plan`."""
    layout = Layout(config, arch)
    roles = _roles(layout)
    edges = EdgePlan(roles, _edges(layout), layout.ctas)
    smem = layout.smem(edges.barrier_bytes)
    return Plan90(config, layout, roles, edges, smem, BarrierPlan(roles, _barriers(layout, roles)))


def _roles(layout: Layout) -> RolePlan:
    teams = layout.teams
    computes, loads = layout.registers[teams]
    first = 4 * teams
    load_v = Role("load_v", first + 1, 1, "load tiles of V by TMA", loads)
    idle = "give registers to the warps that compute"
    others: tuple[Role, ...] = (load_v, Role("idle", first + 2, 2, idle, loads))
    if layout.config.is_fp8:
        turn = Role("turn", first + 2, 2, "transpose tiles of V to [column, key]", loads)
        others = (load_v, turn)
    if layout.config.k_is_v:
        others = (Role("idle", first + 1, 3, idle, loads),)
    return RolePlan(
        (
            Role("math", 0, first, "S = Q K^T, softmax, O += P V", computes, teams),
            Role("load_qk", first, 1, "load Q and tiles of K by TMA", loads),
            *others,
        )
    )  # fmt: skip


def _barriers(layout: Layout, roles: RolePlan) -> tuple[NamedBarrier, ...]:
    """Return the named barriers; ids are reserved for three warpgroups, even if two compute."""
    math, role = ("math",), roles["math"]
    warpgroup = role.team_threads
    return (
        NamedBarrier(
            "warpgroup", math, warpgroup, "all threads of a warpgroup arrived", MOST_TEAMS
        ),
        NamedBarrier(
            "turn",
            math,
            min(role.teams, 2) * warpgroup,
            "the warpgroup may issue products (ping-pong order)",
            MOST_TEAMS,
        ),
        NamedBarrier("cleared", math, role.threads, "rows of V past the last key are zero"),
        NamedBarrier(
            "sums", math, layout.sharers * warpgroup, "warpgroups of a query tile stored their sums"
        ),
    )


def _edges(layout: Layout) -> tuple[Edge, ...]:
    """Return the edges: which role waits for which."""
    k_stages, v_stages = layout.stages
    ring: dict[str, Any] = {"signal": Signal.TMA, "release": Signal.WARPS}
    # If two warpgroups share a query tile, exactly one of them releases each piece: the one that
    # multiplies by it. If V is K, that is the P V product, which is always the later use.
    shares = layout.sharers > 1
    part = "piece" if shares else "tile"
    keys: dict[str, Any] = {"every_team": not shares, "multicast": layout.multicast, **ring}
    others: tuple[Edge, ...] = ()
    if layout.config.is_fp8:
        others = (
            Edge("vt", "turn", "math", VT_STAGES, Signal.THREADS, "V tile, transposed",
                 release=Signal.WARPS, every_team=True),
        )  # fmt: skip
    if shares:
        others = (
            Edge("p", "math", "math", layout.teams, Signal.WARPS, "P of a warpgroup's key tile",
                 release=Signal.WARPS),
        )  # fmt: skip
    q = Edge("q", "load_qk", "math", layout.q_tiles, payload="Q tile",
             tx_bytes=layout.q_box_bytes, every_team=shares, **ring)  # fmt: skip
    k = Edge("k", "load_qk", "math", k_stages, payload=f"K {part}", tx_bytes=layout.k_bytes, **keys)
    v = Edge("v", "load_v", "turn" if layout.config.is_fp8 else "math", v_stages,
             payload=f"V {part}", tx_bytes=layout.v_bytes, **keys)  # fmt: skip
    return (q, k, *others) if layout.config.k_is_v else (q, k, v, *others)
