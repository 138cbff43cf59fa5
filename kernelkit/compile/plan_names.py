"""A kernel's roles and barriers by the names of its plan, for the emulator's reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from kernelkit.compile.keys import KernelKey
from kernelkit.plan import hw
from kernelkit.plan.warps import RolePlan


def plan_of(key: KernelKey | None) -> tuple[Any, RolePlan] | None:
    """The plan of a kernel that has one, from what it was compiled for.

    Its module is called `plan`, lies beside the kernel's or one folder above, and has
    `make_plan(config)`, and ROLES where plans do not hold theirs.

    Returns:
        (plan with edges, smem and tmem; its roles); None for a kernel without, and for a config
        that its plan refuses: a report about such a kernel is not to end in that refusal.
    """
    package = key.module.rpartition(".")[0] if key else ""
    for name in filter(None, (package, package.rpartition(".")[0])):
        module = _plan_module(name)
        if key and hasattr(module, "make_plan"):
            try:
                plan = module.make_plan(key.config)
            except (ValueError, NotImplementedError):
                return None
            return plan, getattr(module, "ROLES", None) or plan.roles
    return None


def _plan_module(package: str) -> Any:
    try:
        return import_module(f"{package}.plan") if find_spec(f"{package}.plan") else None
    except ModuleNotFoundError:  # no package: a kernel of a test, by the name of its function
        return None


def naming(key: KernelKey | None) -> dict[str, Mapping[Any, str]]:
    """`roles` and `names` of `ptxemu.Options` for launches of this kernel. The plan is made when a
    report asks for them."""
    return {"roles": _Later(partial(_roles, key)), "names": _Later(partial(_barriers, key))}


def warps_of(roles: RolePlan) -> dict[int, str]:
    """Warp -> name of its role, in the order of the plan."""
    return {role.first_warp + i: role.name for role in roles.roles for i in range(role.warps)}


def _roles(key: KernelKey | None) -> dict[Any, str]:
    found = plan_of(key)
    return dict(warps_of(found[1])) if found else {}


def _barriers(key: KernelKey | None) -> dict[Any, str]:
    """Names of mbarriers by shared address. Dynamic shared memory begins after the reserved
    bytes."""
    found = plan_of(key)
    begins = found[0].smem.offsets() if found else {}
    if "barriers" not in begins:  # a kernel without mbarriers
        return {}
    return found[0].edges.barrier_names(hw.SMEM_RESERVED_BYTES + begins["barriers"][0])


class _Later(Mapping[Any, str]):
    """A mapping that is made when it is first looked into."""

    def __init__(self, make: Callable[[], dict[Any, str]]) -> None:
        self._make = make

    @cached_property
    def _made(self) -> dict[Any, str]:
        return self._make()

    def __getitem__(self, key: Any) -> str:
        return self._made[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)
