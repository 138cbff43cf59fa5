"""Which query blocks a CTA computes, one after another (device code).

The grid has no more CTAs, or pairs, than run at the same time. Heads are taken section by section
(`fmha.sections` says how many make one), so that what is read again is still in L2. In round r of a
section a CTA takes block r * CTAs + its number, in every second round counted from the other end:
where blocks are ordered by their length, who had the longest one takes the shortest next. Nobody
waits at the end of a section; who has no block in its last round computes one without rows.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fmha.plan import AttentionPlan
from fmha.shared.args import Order


@cute.jit
def make_order(
    blocks: Int32,
    heads: Int32,
    group: Int32,
    entries: Int32,
    section: Int32,
    near: Int32,
    places: Int32,
) -> Order:
    """Host: of all blocks over so many CTAs, or pairs. near: heads whose blocks alternate, one or
    all of a section."""
    every = heads * entries
    last = cutlass.max(every - 1, 0) // section
    rest = every - last * section
    last_near = cutlass.max(cutlass.min(near, rest), 1)
    return Order(
        rounds=cute.FastDivmodDivisorV2(cute.ceil_div(section * blocks, places)),
        section=section,
        near=cute.FastDivmodDivisorV2(near),
        near_blocks=cute.FastDivmodDivisorV2(near * blocks),
        last=last,
        last_near=cute.FastDivmodDivisorV2(last_near),
        last_near_blocks=cute.FastDivmodDivisorV2(last_near * blocks),
        heads=cute.FastDivmodDivisorV2(heads),
        group=cute.FastDivmodDivisorV2(group),
        blocks=blocks,
        last_rounds=rest * blocks // places,
        left=rest * blocks % places,
    )


@cute.jit
def place_in_grid(plan: AttentionPlan) -> tuple[Int32, Int32]:
    """(number of this CTA or pair, how many there are)."""
    number, _, _ = cute.arch.block_idx()
    places, _, _ = cute.arch.grid_dim()
    return number // plan.layout.ctas, places // plan.layout.ctas


@cute.jit
def count_rounds(plan: AttentionPlan, order: Order) -> Int32:
    """How many blocks this CTA or pair computes, those without rows included."""
    more = Int32(position(plan, order.last, order.last_rounds) < order.left)
    return order.last * order.rounds.divisor + order.last_rounds + more


@cute.jit
def position(plan: AttentionPlan, section: Int32, turn: Int32) -> Int32:
    """Of this CTA or pair among those that take a block in round `turn` of a section."""
    number, places = place_in_grid(plan)
    if (section + turn) % 2 == 1:
        number = places - 1 - number
    return number


@cute.jit
def block_of(plan: AttentionPlan, order: Order, turn: Int32) -> tuple[Int32, Int32, Int32]:
    """(query block, head, entry) of round `turn`, of all sections counted together."""
    _, places = place_in_grid(plan)
    if cutlass.const_expr(plan.config.even_rows):  # one section, head after head
        index = turn * places + position(plan, Int32(0), turn)
        head, q_block = divmod(index, order.near_blocks)
        entry, head = divmod(head, order.heads)
        if cutlass.const_expr(plan.config.right):
            q_block = order.blocks - 1 - q_block
        return q_block, head, entry
    section, turn = divmod(turn, order.rounds)
    index = turn * places + position(plan, section, turn)
    row, rest = divmod(index, order.near_blocks)
    q_block, head = divmod(rest, order.near)
    near, in_section = order.near.divisor, order.section * order.blocks
    if section == order.last:
        row, rest = divmod(index, order.last_near_blocks)
        q_block, head = divmod(rest, order.last_near)
        near, in_section = order.last_near.divisor, order.last_rounds * places + order.left
    if cutlass.const_expr(plan.config.right):
        q_block = order.blocks - 1 - q_block  # the longest rows first
    if index >= in_section:
        q_block, row, head = order.blocks, Int32(0), Int32(0)
    entry, head = divmod(section * order.section + row * near + head, order.heads)
    return q_block, head, entry
