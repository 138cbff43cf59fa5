"""Roles of a CTA, the warps of each, and their registers. Plain data.

A role is the work of a warp for the whole life of the CTA. `RolePlan.check` refuses gaps, overlaps
and register budgets that the SM cannot hold. Registers move between warpgroups (setmaxnreg) only if
every warpgroup is whole and all its warps have roles of one budget.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernelkit.plan import hw


@dataclass(frozen=True)
class Role:
    """`warps` neighbouring warps from `first_warp` on.

    registers: per thread, to be set by setmaxnreg; None leaves what the compiler chose.
    teams: equal parts of the role that do the same, each for its own tile. Stage t of an edge
        from or to the role belongs to team t.
    """

    name: str
    first_warp: int
    warps: int
    duty: str
    registers: int | None = None
    teams: int = 1

    @property
    def team_threads(self) -> int:
        return self.threads // self.teams

    @property
    def threads(self) -> int:
        return self.warps * hw.WARP_THREADS

    @property
    def last_warp(self) -> int:
        return self.first_warp + self.warps - 1


@dataclass(frozen=True)
class RolePlan:
    """All roles of a CTA in the order of their warps."""

    roles: tuple[Role, ...]

    def __getitem__(self, name: str) -> Role:
        """The role of that name; KeyError lists the names there are."""
        for role in self.roles:
            if role.name == name:
                return role
        raise KeyError(f"no role {name!r}; roles are {[role.name for role in self.roles]}")

    @property
    def warps(self) -> int:
        return sum(role.warps for role in self.roles)

    @property
    def threads(self) -> int:
        return self.warps * hw.WARP_THREADS

    def check(self) -> None:
        """Raise ValueError, naming value and limit, for a CTA that cannot be launched."""
        next_warp = 0
        for role in self.roles:
            if role.first_warp != next_warp:
                raise ValueError(
                    f"role {role.name} starts at warp {role.first_warp}, expected {next_warp}: "
                    "roles cover the warps in order, without gap or overlap"
                )
            next_warp += role.warps
        if self.threads > hw.MAX_THREADS_PER_CTA:
            raise ValueError(f"{self.threads} threads, limit {hw.MAX_THREADS_PER_CTA}")
        if any(role.registers is not None for role in self.roles):
            self._check_registers()

    def _check_registers(self) -> None:
        if self.warps % hw.WARPGROUP_WARPS:
            raise ValueError(
                f"setmaxnreg with {self.warps} warps: every warpgroup of "
                f"{hw.WARPGROUP_WARPS} warps must be whole"
            )
        per_warp = [role.registers for role in self.roles for _ in range(role.warps)]
        for start in range(0, self.warps, hw.WARPGROUP_WARPS):
            budgets = set(per_warp[start : start + hw.WARPGROUP_WARPS])
            if len(budgets) != 1 or None in budgets:
                raise ValueError(
                    f"warps {start}..{start + hw.WARPGROUP_WARPS - 1} have register budgets "
                    f"{budgets}: setmaxnreg acts on whole warpgroups"
                )
        for registers in set(per_warp):
            if registers not in hw.SETMAXNREG:
                raise ValueError(
                    f"{registers} registers: setmaxnreg needs a multiple of {hw.SETMAXNREG.step} "
                    f"from {hw.SETMAXNREG[0]} to {hw.SETMAXNREG[-1]}"
                )
        # Warps that request registers wait for others to release some: the launch fixes the pool.
        at_launch = hw.REGISTERS_PER_SM // self.threads // hw.SETMAXNREG.step * hw.SETMAXNREG.step
        total, limit = sum(per_warp) * hw.WARP_THREADS, at_launch * self.threads
        if total > limit:
            raise ValueError(f"{total} registers in all, limit {limit}: {at_launch} a thread")
