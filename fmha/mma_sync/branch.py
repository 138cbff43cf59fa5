"""Branches that ptxas leaves as they are (device code)."""

import cutlass.cute as cute
from cutlass import Boolean, Int32


@cute.jit
def once(condition: Boolean) -> Int32:
    """1 or 0, how often a loop is to run that stands for an `if`. What is in an `if` ptxas would do
    for every tile, under predicates; what a loop does it skips, since it cannot know the number."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[Int32(condition)]
    )
