"""AttentionConfig -> roles, memory layout and barriers: plain data, made by the `plan.py` of the
architecture.

The kernels allocate and dispatch by a plan; `scripts/explain.py` and the README print it. Reading
order: roles (warps), edges (mbarriers), then the architecture's `layout.py`: the memory layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from typing import Any

from fmha.config import AttentionConfig
from fmha.tiles import Tiles
from kernelkit.compile.arch import written_for
from kernelkit.plan.edges import EdgePlan
from kernelkit.plan.smem import SmemPlan
from kernelkit.plan.warps import RolePlan

OWN = {"sm_100a": "sm100", "sm_90a": "sm90"}  # folders of kernels for one architecture


@dataclass(frozen=True)
class AttentionPlan:
    """Everything that is decided before tracing."""

    config: AttentionConfig
    layout: Tiles
    roles: RolePlan
    edges: EdgePlan
    smem: SmemPlan

    def check(self) -> None:
        """Raise for a plan that cannot run; every part names its own value and limit."""
        self.roles.check()
        self.edges.check()
        self.smem.check()


def make_plan(config: AttentionConfig, arch: str = "sm_100a") -> AttentionPlan:
    """The plan of `config` for the kernel of `arch`, checked."""
    config.check_values()
    layout = tiles_of(config, arch)
    layout.check_options()
    layout.check()
    plan = plan_unchecked(config, arch)
    plan.check()
    return plan


def plan_unchecked(config: AttentionConfig, arch: str = "sm_100a") -> AttentionPlan:
    """Return the plan without checks, for configs that the compiler, ptxas or the launch would
    refuse.
    """
    return _module(config, arch).plan_unchecked(config, arch)


@lru_cache(maxsize=4096)  # looked up several times per call; layouts are data
def tiles_of(config: AttentionConfig, arch: str = "sm_100a") -> Tiles:
    """Return the tiles of `config` for the kernel of `arch`, unchecked."""
    return _module(config, arch).Layout(config, arch)


def kernel_of(config: AttentionConfig, arch: str) -> str:
    """The module of the kernel that serves `config` on `arch`."""
    return f"fmha.{_folder(config, arch)}.kernel"


def _folder(config: AttentionConfig, arch: str) -> str:
    own = OWN.get(written_for(arch))
    if own is None or config.instructions == "mma.sync" or not config.has_own_dims:
        return "portable"
    return own


def _module(config: AttentionConfig, arch: str) -> Any:
    return _imported(f"fmha.{_folder(config, arch)}.plan")


_imported = cache(import_module)  # an uncached lookup costs as much as choosing a config
