"""From the router's choice to items, in every CTA (device code).

An item is up to ITEM_ROWS rows of one expert. An expert with more rows has several. Its rows are in
the order of their slots: CTAs divide the columns of an item between them, so all CTAs must find the
same rows in it.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from kernelkit.device.lanes import sum_below
from kernelkit.plan.hw import WARP_THREADS
from moe.kernel_arguments import FewSizes, FewTensors
from moe.mixed.few.args import Buffers, Scope, Share
from moe.mixed.few.config import GROUPS, ITEM_ROWS, MOST_EXPERTS
from moe.mixed.few.plan import FewPlan
from moe.routing.warp import lanes_alike, lanes_below

ROWS_SHIFT = 16  # of the number of rows in a word of `items`
EXPERT_BITS = 10  # of an expert, or -1 for none


@cute.jit
def clear(plan: cutlass.Constexpr[FewPlan], buffers: Buffers, sizes: FewSizes) -> None:
    """Set the counts of experts to zero."""
    thread, _, _ = cute.arch.thread_idx()
    for expert in cutlass.range(thread, sizes.experts, plan.roles.threads, unroll=1):
        buffers.counts[expert] = Int32(0)


@cute.jit
def expert_of(slot: Int32, ids: cute.Tensor, sizes: FewSizes) -> Int32:
    """Return the index of a slot's expert among those that are here; -1 for none, or no slot."""
    expert = Int32(-1)
    if slot < cute.size(ids):
        expert = ids[slot] - sizes.first_expert
        if Uint32(expert) >= Uint32(sizes.experts):
            expert = Int32(-1)
    return expert


@cute.jit
def make_items(
    plan: cutlass.Constexpr[FewPlan], buffers: Buffers, tensors: FewTensors, sizes: FewSizes
) -> Int32:
    """Write the tables of items; return how many there are. `slots` is complete behind the next
    barrier of the CTA."""
    thread, _, _ = cute.arch.thread_idx()
    place, chosen = Int32(0), buffers.slots  # not yet used for slots
    expert = expert_of(thread, tensors.ids, sizes)
    if thread < cute.size(tensors.ids):
        chosen[thread] = expert
    if expert >= 0:
        count = buffers.counts.iterator + expert
        cute.arch.atomic_add(count, Int32(1), sem="relaxed", scope="cta")
    cute.arch.sync_threads()
    if expert >= 0:
        for before in cutlass.range(thread, unroll=4):
            place += Int32(chosen[before] == expert)
    if thread < WARP_THREADS:
        number_items(buffers, sizes)
    cute.arch.sync_threads()
    if expert >= 0:
        item = buffers.counts[expert] + place // ITEM_ROWS
        buffers.slots[item * ITEM_ROWS + place % ITEM_ROWS] = thread
    return cute.arch.make_warp_uniform(buffers.words[0])


@cute.jit
def number_items(buffers: Buffers, sizes: FewSizes) -> None:
    """Number the items in the order of experts. The lanes of one warp have neighbouring experts."""
    lane = cute.arch.lane_idx()
    each = (sizes.experts + WARP_THREADS - 1) // WARP_THREADS
    first = lane * each
    end = cutlass.min(first + each, sizes.experts)
    own = Int32(0)
    for expert in cutlass.range(first, end, unroll=1):
        own += (buffers.counts[expert] + ITEM_ROWS - 1) // ITEM_ROWS
    item = sum_below(own, lane)
    if lane == WARP_THREADS - 1:
        buffers.words[0] = item + own
    for expert in cutlass.range(first, end, unroll=1):
        rows = buffers.counts[expert]
        buffers.counts[expert] = item
        while rows > 0:
            taken = cutlass.min(rows, ITEM_ROWS)
            buffers.items[item] = expert | taken << ROWS_SHIFT
            rows -= taken
            item += 1


@cute.jit
def make_items_of_warp(buffers: Buffers, ids: cute.Tensor, sizes: FewSizes) -> Int32:
    """Write the tables of items by one warp, a lane for each row; return how many items there are.
    Items are in the order of their first rows. No lane waits for shared memory, so the warp that
    calls this can request weights at once."""
    lane = cute.arch.lane_idx()
    expert = expert_of(lane, ids, sizes)
    alike, below = lanes_alike(expert, EXPERT_BITS), lanes_below(lane)
    place = cute.arch.popc(alike & below)
    leads = (expert >= 0) & (place % ITEM_ROWS == 0)
    leaders = cute.arch.vote_ballot_sync(leads)
    # The last lane of this expert, up to this one, that leads.
    leader = WARP_THREADS - 1 - cute.arch.clz(leaders & alike & (below | Int32(1) << lane))
    item = cute.arch.popc(leaders & lanes_below(leader))
    if expert >= 0:
        buffers.slots[item * ITEM_ROWS + place % ITEM_ROWS] = lane
    if leads:
        taken = cutlass.min(cute.arch.popc(alike) - place, ITEM_ROWS)
        buffers.items[item] = expert | taken << ROWS_SHIFT
    items = cute.arch.popc(leaders)
    if lane == 0:
        buffers.words[0] = items
    cute.arch.sync_warp()
    return items


# ---- shares of CTAs


@cute.jit
def divide(
    plan: cutlass.Constexpr[FewPlan], chunks: Int32, behind: cutlass.Constexpr[bool]
) -> tuple[Int32, Int32]:
    """Return the first group of this CTA and the group after its last one. Of a remainder of
    granules, the first CTAs get one more each; with `behind` the last ones, so that both products
    give equal work."""
    cta, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    granules = chunks * (GROUPS // plan.config.granule)
    each, more = granules // ctas, granules % ctas
    first, has_more = cta * each + cutlass.min(cta, more), cta < more
    if cutlass.const_expr(behind):
        first, has_more = cta * each + cutlass.max(cta - (ctas - more), 0), cta >= ctas - more
    end = first + each + Int32(has_more)
    return first * plan.config.granule, end * plan.config.granule


@cute.jit
def share_of(
    plan: cutlass.Constexpr[FewPlan],
    phase: cutlass.Constexpr[int],
    scope: Scope,
) -> Share:
    """Return this CTA's share of a product: of the first one with the chunks of an item next to
    each other, of the second one with items of the same columns next to each other."""
    items, sizes = scope.items, scope.sizes
    if cutlass.const_expr(phase == 0):
        first, end = divide(plan, items * sizes.tall13, False)
        chunk = first // GROUPS
        share = Share(first, end, chunk // sizes.tall13, chunk % sizes.tall13)
    else:
        first, end = divide(plan, items * sizes.tall2, True)
        chunk, some = first // GROUPS, cutlass.max(items, 1)
        share = Share(first, end, chunk % some, chunk // some)
    return share


# ---- chunks of a share


def groups_of(at: Int32, end: Int32) -> Int32:
    """Return the number of groups of the chunk at group `at`."""
    return cutlass.min(GROUPS - (at & (GROUPS - 1)), end - at)


def next_chunk(at: Int32) -> Int32:
    """Return the first group behind a chunk's 64 rows."""
    return (at | (GROUPS - 1)) + 1


@cute.jit
def chunk_behind(
    phase: cutlass.Constexpr[int], item: Int32, tall: Int32, items: Int32, sizes: FewSizes
) -> tuple[Int32, Int32]:
    """Return (item, tall) of the next chunk of a product."""
    if cutlass.const_expr(phase == 0):
        tall += 1
        if tall == sizes.tall13:
            tall = Int32(0)
            item += 1
    else:
        item += 1
        if item == items:
            item = Int32(0)
            tall += 1
    return item, tall


assert MOST_EXPERTS < 1 << EXPERT_BITS
assert MOST_EXPERTS < 1 << ROWS_SHIFT
