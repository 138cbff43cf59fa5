"""Q in bf16 as two tiles of e4m3, in its own place in shared memory: a row a thread (device code).

The softmax warps of a query tile do it, at the beginning of a block: they have the registers, and
the power of two of a row is known where its scores are. In the ping-pong schedule those of the
other tile compute meanwhile. Four warps of their own would leave softmax warps of two query tiles
152 registers, too few for 128 scores.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32

from fmha.shared.split import anew, largest_of, place_of, power_of, two_terms
from fmha.sm100.args import Row
from fmha.sm100.plan import Plan
from kernelkit.device.barriers import meet
from kernelkit.device.shared_words import load, store
from kernelkit.plan import hw

WORDS = hw.SMEM_UNIT_BYTES // 4


@cute.jit
def split_row(plan: Plan, of: Row, buffer: cute.Pointer) -> Float32:
    """The thread's row of sQ as two terms, the larger one first, for the tensor core; returns what
    its scores are to be multiplied by. Every thread of the query tile takes part."""
    layout, head_dim, row = plan.layout, plan.config.head_dim, anew(of.row)
    start = buffer.toint() + of.q_tile * layout.q_bytes
    words = cute.make_rmem_tensor(head_dim // 2, Uint32)
    line = layout.panel(layout.k_columns, plan.config.q_item_bytes) * plan.config.q_item_bytes
    for unit in cutlass.range_constexpr(head_dim // 2 // WORDS):
        found = load(start + place_of(line, layout.rows, row, unit), Uint32, WORDS)
        for word in cutlass.range_constexpr(WORDS):
            words[unit * WORDS + word] = found[word]
    if cutlass.const_expr(layout.q_rows < layout.rows):
        if row >= layout.q_rows:  # they hold anything
            words.fill(0)
    factor, power = power_of(largest_of(words))
    meet(plan.barriers, "q_read", of.q_tile)
    line = layout.panel(layout.k_columns)
    for unit in cutlass.range_constexpr(head_dim // hw.SMEM_UNIT_BYTES):
        begin = 2 * unit * WORDS
        low, high = (
            two_terms(tuple(words[first + word] for word in range(WORDS)), factor)
            for first in (begin, begin + WORDS)
        )
        place = start + place_of(line, layout.rows, row, unit)
        store(place, Uint32, (*low[:2], *high[:2]))
        store(place + layout.rows * head_dim, Uint32, (*low[2:], *high[2:]))
    cute.arch.fence_proxy("async.shared", space="cta")
    return power
