"""The plan of a kernel that has one, from the key that it was compiled for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kernelkit.compile import in_memory
from kernelkit.keys import KernelKey
from kernelkit.warps import RolePlan

# package of a kernel -> module with `make_plan(config)`, and ROLES where plans do not hold theirs
PLANS = {
    "fmha.sm100": "fmha.plan",
    "fmha.sparse.indexer.sm100": "fmha.sparse.indexer.sm100.plan",
    "gqa_lowlatency.sm100": "gqa_lowlatency.sm100.plan",
    "moe.sm100": "moe.sm100.plan",
}


def plan_of(key: KernelKey | None) -> tuple[Any, RolePlan] | None:
    """(plan with edges, smem and tmem; its roles); None for a kernel without."""
    package = key.source.rpartition(".")[0] if key else ""
    if package not in PLANS:
        return None
    module = import_module(PLANS[package])
    plan = module.make_plan(key.config)
    return plan, getattr(module, "ROLES", None) or plan.roles


def key_of(entry: str) -> KernelKey | None:
    """Of the kernel with this entry point, among those that this process has compiled or found."""
    found = [key for key, kernel in in_memory() if f".entry {entry}" in kernel.ptx]
    return found[-1] if found else None
