"""AttentionConfig -> roles of the mma.sync kernel. Plain data.

All warps compute and fetch: no role waits for another, all warps wait for tiles. All warps of a
CTA synchronise once for each key tile.
"""

from __future__ import annotations

from dataclasses import dataclass

from fmha.config import AttentionConfig
from fmha.plan import AttentionPlan
from fmha.portable.layout import MOST_PAIRS, PAIR, Layout, Shape
from kernelkit.plan import hw
from kernelkit.plan.barriers import BarrierPlan, NamedBarrier
from kernelkit.plan.edges import EdgePlan
from kernelkit.plan.warps import Role, RolePlan


@dataclass(frozen=True)
class PortablePlan(AttentionPlan):
    """Plan of the mma.sync kernel."""

    layout: Layout
    barriers: BarrierPlan

    def check(self) -> None:
        super().check()
        self.barriers.check()


def plan_unchecked(config: AttentionConfig, arch: str) -> PortablePlan:
    """The plan of `config`, see `fmha.plan`."""
    layout = Layout(config, arch)
    duty = "load K and V, S = Q K^T, softmax, O += P V"
    roles = RolePlan((Role("math", 0, layout.warps, duty, teams=layout.shape.teams),))
    barriers = BarrierPlan(roles, _barriers(layout.shape))
    return PortablePlan(config, layout, roles, EdgePlan(roles, ()), layout.smem(), barriers)


def _barriers(shape: Shape) -> tuple[NamedBarrier, ...]:
    """Return the named barriers. If warps share keys, ids are reserved for the most
    teams possible.
    """
    if shape.slices == 1:
        return ()
    threads, math = shape.slices * hw.WARP_THREADS, ("math",)
    teams = MOST_PAIRS if shape.shares_keys else shape.teams
    team = NamedBarrier("team", math, threads, "all warps of a team arrived", teams)
    if not shape.shares_keys:
        return (team,)
    ready = NamedBarrier("ready", math, threads, "P of one warp's keys is ready", PAIR * MOST_PAIRS)
    return team, ready
