"""Registers that warpgroups take from each other (device code)."""

import cutlass
import cutlass.cute as cute

from kernelkit.plan import hw
from kernelkit.plan.warps import Role, RolePlan


@cute.jit
def set_registers(roles: RolePlan, role: Role) -> None:
    """Take or give registers, where the plan says how many the role needs."""
    if cutlass.const_expr(role.registers is not None):
        if cutlass.const_expr(role.registers > hw.REGISTERS_PER_SM // roles.threads):
            cute.arch.setmaxregister_increase(role.registers)
        else:
            cute.arch.setmaxregister_decrease(role.registers)
