"""Which query blocks a CTA computes, one after another (device code).

The grid has no more CTAs, or pairs, than run at the same time. In round r a CTA takes block
r * CTAs + its number, in odd rounds counted from the other end: where blocks are ordered by their
length, who had the longest one takes the shortest next.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fmha.device.args import Order
from fmha.plan import AttentionPlan


@cute.jit
def make_order(
    blocks: Int32, heads: Int32, group: Int32, entries: Int32, near: Int32, places: Int32
) -> Order:
    """Host: of all blocks over so many CTAs, or pairs. near divides heads * entries."""
    return Order(
        section=cute.FastDivmodDivisorV2(near * blocks),
        near=cute.FastDivmodDivisorV2(near),
        heads=cute.FastDivmodDivisorV2(heads),
        group=cute.FastDivmodDivisorV2(group),
        blocks=blocks,
        rounds=blocks * heads * entries // places,
        left=blocks * heads * entries % places,
    )


@cute.jit
def place_in_grid(plan: AttentionPlan) -> tuple[Int32, Int32]:
    """(number of this CTA or pair, how many there are)."""
    number, _, _ = cute.arch.block_idx()
    places, _, _ = cute.arch.grid_dim()
    return number // plan.layout.ctas, places // plan.layout.ctas


@cute.jit
def count_rounds(plan: AttentionPlan, order: Order) -> Int32:
    """How many blocks this CTA or pair computes."""
    return order.rounds + Int32(position(plan, order.rounds) < order.left)


@cute.jit
def position(plan: AttentionPlan, turn: Int32) -> Int32:
    """Of this CTA or pair among those that take a block in round `turn`."""
    number, places = place_in_grid(plan)
    if turn % 2 == 1:
        number = places - 1 - number
    return number


@cute.jit
def block_of(plan: AttentionPlan, order: Order, turn: Int32) -> tuple[Int32, Int32, Int32]:
    """(query block, head, entry) of round `turn`."""
    _, places = place_in_grid(plan)
    section, rest = divmod(turn * places + position(plan, turn), order.section)
    q_block, head = divmod(rest, order.near)
    entry, head = divmod(section * order.near.divisor + head, order.heads)
    if cutlass.const_expr(plan.config.right):
        q_block = order.blocks - 1 - q_block  # the longest rows first
    return q_block, head, entry
