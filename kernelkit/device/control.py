"""Control flow and registers of warps (device code)."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from kernelkit.plan import hw
from kernelkit.plan.warps import Role, RolePlan


@cute.jit
def once(condition: Boolean) -> Int32:
    """Return the condition as an opaque trip count of 0 or 1.

    `for _ in cutlass.range(once(c), unroll=1)` acts like `if c`, but ptxas cannot convert it into
    predicates, so the body is really skipped where c is false.
    """
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[Int32(condition)]
    )


@cute.jit
def set_registers(roles: RolePlan, role: Role) -> None:
    """Take or give registers, where the plan says how many the role needs."""
    if cutlass.const_expr(role.registers is not None):
        if cutlass.const_expr(role.registers > hw.REGISTERS_PER_SM // roles.threads):
            cute.arch.setmaxregister_increase(role.registers)
        else:
            cute.arch.setmaxregister_decrease(role.registers)
