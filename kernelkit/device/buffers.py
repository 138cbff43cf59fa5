"""Buffers of a plan in shared memory (device code)."""

import math

import cutlass
import cutlass.cute as cute

from kernelkit.plan import hw
from kernelkit.plan.smem import SmemPlan


def buffer_at(
    plan: SmemPlan, smem: cute.Pointer, name: str, dtype: type[cutlass.Numeric]
) -> cute.Pointer:
    """The buffer of that name, where the plan puts it behind `smem`, aligned as that tells."""
    begin = plan.offsets()[name][0]
    align = max(dtype.width // 8, math.gcd(begin, hw.SMEM_SWIZZLE_ALIGN))
    return cute.recast_ptr((smem + begin).align(align), dtype=dtype)
