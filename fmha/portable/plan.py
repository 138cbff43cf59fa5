"""AttentionConfig -> who works in the mma.sync kernel. Plain data.

All warps compute, and all of them fetch: there are no roles to wait for each other, only tiles that
all wait for. A CTA meets once for each key tile.
"""

from __future__ import annotations

from dataclasses import dataclass

from fmha.config import AttentionConfig
from fmha.plan import AttentionPlan
from fmha.portable.layout import MOST_PAIRS, Layout
from kernelkit.plan.edges import EdgePlan
from kernelkit.plan.warps import Role, RolePlan

TEAM_BARRIER = 1  # and the next ones: all warps of a team; 0 is that of the whole CTA
# Where warps share keys, of each warp: its P is there.
READY_BARRIER = TEAM_BARRIER + MOST_PAIRS


@dataclass(frozen=True)
class PortablePlan(AttentionPlan):
    """That of the mma.sync kernel."""

    layout: Layout


def plan_unchecked(config: AttentionConfig, arch: str) -> PortablePlan:
    """The plan of `config`, see `fmha.plan`."""
    layout = Layout(config, arch)
    duty = "fetches K and V, S = Q K^T, softmax, O += P V"
    roles = RolePlan((Role("math", 0, layout.warps, duty, teams=layout.shape.teams),))
    return PortablePlan(config, layout, roles, EdgePlan(roles, ()), layout.smem())
