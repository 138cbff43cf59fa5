"""Branches that ptxas leaves as they are (device code)."""

import cutlass.cute as cute
from cutlass import Boolean, Int32


@cute.jit
def once(condition: Boolean) -> Int32:
    """Return the condition as an opaque trip count of 0 or 1.

    `for _ in cutlass.range(once(c), unroll=1)` acts like `if c`, but ptxas cannot convert it into
    predicates, so the body is really skipped where c is false.
    """
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[Int32(condition)]
    )
