"""Query blocks that a CTA computes, and key tiles of each block (device code).

The grid has no more CTAs, or pairs, than run at the same time. Heads are processed section by
section (`fmha.sections` chooses the size), so that data read again is still in L2. In round r of a
section a CTA computes block r * CTAs + its number; in every second round the number counts from the
other end. If blocks are ordered by length, the CTA with the longest one then gets the shortest.
No CTA waits at the end of a section. A CTA without a block in the last round computes a block
without rows.

Row r of an entry sees keys [begin(r), end(r)), both of which never decrease with r. With sink
tokens the row also sees keys below `sink_tokens` and end(r). So the tiles of a query block are one
range, with partly visible tiles at its two ends, and a second range of first keys for the sink
tokens. Tiles between the two ranges are never loaded.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint64

from fmha.plan import AttentionPlan
from fmha.shared.args import Globals, Lists, Order, Row, Scalars, Spot, Tables, Walk, Work
from kernelkit.device.online_softmax import Branch
from kernelkit.plan.limits import MAX_TREE_TOKENS


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
    """Make the order of all blocks over `places` CTAs, or pairs (host code).

    near: heads whose blocks alternate, one or all of a section.
    """
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
    """Return (number of this CTA or pair, number of CTAs or pairs)."""
    number, _, _ = cute.arch.block_idx()
    places, _, _ = cute.arch.grid_dim()
    return number // plan.layout.ctas, places // plan.layout.ctas


@cute.jit
def count_rounds(plan: AttentionPlan, order: Order) -> Int32:
    """Return the number of blocks that this CTA or pair computes, including those without rows."""
    more = Int32(position(plan, order.last, order.last_rounds) < order.left)
    return order.last * order.rounds.divisor + order.last_rounds + more


@cute.jit
def position(plan: AttentionPlan, section: Int32, turn: Int32) -> Int32:
    """Return the index of this CTA's or pair's block in round `turn` of a section."""
    number, places = place_in_grid(plan)
    if (section + turn) % 2 == 1:
        number = places - 1 - number
    return number


@cute.jit
def block_of(plan: AttentionPlan, order: Order, turn: Int32) -> tuple[Int32, Int32, Int32]:
    """Return (query block, head, entry) of round `turn`, counted over all sections."""
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


@cute.jit
def locate(plan: AttentionPlan, tensors: Globals, turn: Int32) -> Work:
    """Return the block that this CTA computes in round `turn`, without its walk."""
    config, tables = plan.config, tensors.tables
    q_block, head, batch = block_of(plan, tensors.order, turn)
    if cutlass.const_expr(config.block_keys > 0):
        q_block = ranked_block(plan, tensors, q_block, head, batch)
    rank = Int32(0)
    if cutlass.const_expr(plan.layout.ctas > 1):
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    kv_head = head // tensors.order.group
    q_start, q_length = entry_range(tables.cu_seqlens_q, batch, tensors.q_rows)
    kv_start, kv_length = entry_range(tables.cu_seqlens_k, batch, tensors.k_rows)
    if cutlass.const_expr(config.page_size > 0):
        kv_length = cute.size(tables.page_table, mode=[1]) * config.page_size
    if cutlass.const_expr(config.kv_lens):
        kv_length = cutlass.max(cutlass.min(tables.kv_lens[batch], kv_length), 0)
    offset, full_end = kv_length - q_length, kv_length
    if cutlass.const_expr(config.q_offset):
        offset = tables.q_offset[batch]
        full_end = cutlass.max(cutlass.min(offset + q_length, kv_length), 0)
    lists = None
    if cutlass.const_expr(config.block_keys > 0):
        lists = lists_of(plan, tables, q_block, head, batch)
    return Work(
        q_block=q_block,
        head=head,
        kv_head=kv_head,
        batch=batch,
        q_start=q_start,
        q_length=q_length,
        kv_start=kv_start,
        kv_length=kv_length,
        offset=offset,
        full_end=full_end,
        rank=rank,
        lists=lists,
    )


@cute.jit
def ranked_block(
    plan: AttentionPlan, tensors: Globals, rank: Int32, head: Int32, batch: Int32
) -> Int32:
    """Return the query block of a rank in the order of a block mask; what is no block stays."""
    order, of_block = tensors.tables.block_order, plan.layout.of_mask_block
    last = tuple(size - 1 for size in order.shape)
    block = cutlass.min(rank // of_block, last[2])
    first = order[cutlass.min(batch, last[0]), cutlass.min(head, last[1]), block]
    return first * of_block + rank % of_block if rank < tensors.order.blocks else rank


@cute.jit
def lists_of(
    plan: AttentionPlan, tables: Tables, q_block: Int32, head: Int32, batch: Int32
) -> Lists:
    """Return the blocks of keys that a block mask lists for a query block."""
    block = q_block // plan.layout.of_mask_block
    partial, partial_count = list_of(tables.block_counts, tables.block_indices, block, head, batch)
    full, full_count = list_of(tables.full_counts, tables.full_indices, block, head, batch)
    return Lists(partial, partial_count, full, full_count)


@cute.jit
def list_of(
    counts: cute.Tensor, indices: cute.Tensor, block: Int32, head: Int32, batch: Int32
) -> tuple[cute.Tensor, Int32]:
    """Return (list, its length) of a query block; a list of one entry or head serves all."""
    last = tuple(size - 1 for size in counts.shape)
    # Heads that share tiles share the list, so their number is no index.
    b, h = cutlass.min(batch, last[0]), cutlass.min(head, last[1])
    block = cutlass.min(block, last[2])
    count = cutlass.max(cutlass.min(counts[b, h, block], cute.size(indices, mode=[3])), 0)
    return indices[b, h, block, None], count


@cute.jit
def entry_range(cu_seqlens: cute.Tensor | None, batch: Int32, rows: Int32) -> tuple[Int32, Int32]:
    """Return (first row of the tensor, number of rows) of a batch entry, packed or not."""
    start, length = Int32(0), Int32(rows)
    if cutlass.const_expr(cu_seqlens is not None):
        start = cu_seqlens[batch]
        length = cu_seqlens[batch + 1] - start
    return start, length


@cute.jit
def plan_walk(plan: AttentionPlan, work: Work, scalars: Scalars) -> Walk:
    """Return the key tiles of `work`; none if the CTA has no row."""
    config, layout = plan.config, plan.layout
    tile = work.q_block * layout.block_tiles
    first = first_token(plan, tile)
    if cutlass.const_expr(config.block_keys > 0):
        return listed_walk(plan, work, first)
    last = first_token(plan, tile + layout.block_tiles - 1) + layout.box_tokens
    last = cutlass.min(last, work.q_length) - 1
    first_end, last_end = work.full_end, work.full_end
    if cutlass.const_expr(config.tree):
        first_end = cutlass.max(cutlass.min(work.offset, work.full_end), 0)
    if cutlass.const_expr(config.right):
        first_end = row_end(work, first, scalars)
        last_end = row_end(work, last, scalars)
    if first >= work.q_length:
        last_end = Int32(0)
    first_begin, last_begin = Int32(0), Int32(0)
    if cutlass.const_expr(config.left):
        # A token of a tree may be as deep as its number, or a root.
        least = Int32(0) if cutlass.const_expr(config.tree) else first
        first_begin = row_begin(work, least, scalars)
        last_begin = row_begin(work, last, scalars)
    # A box of keys has to lie in one page.
    origin = cutlass.min(first_begin, last_end) // layout.key_step * layout.key_step
    sink = Int32(0)
    if cutlass.const_expr(config.sink_tokens):
        sink = cute.ceil_div(cutlass.min(scalars.sink_tokens, last_end), plan.layout.tile_n)
        if sink * plan.layout.tile_n > origin:
            origin, sink = Int32(0), Int32(0)
    end = cute.ceil_div(last_end - origin, plan.layout.tile_n)
    free_end = cutlass.max(cutlass.min((first_end - origin) // plan.layout.tile_n, end), 0)
    free_begin = cutlass.max(cute.ceil_div(last_begin - origin, plan.layout.tile_n), 0)
    free_begin = cutlass.min(free_begin, free_end)
    right, left = end - free_end, free_begin
    return Walk(
        origin=origin,
        right=right,
        right_end=end,
        left=left,
        left_end=free_begin,
        sink=sink,
        free=free_end - free_begin,
        free_end=free_end,
        masked=right + left + sink,
        seen_end=last_end,
        tiles=right + left + sink + free_end - free_begin,
    )


@cute.jit
def listed_walk(plan: AttentionPlan, work: Work, first: Int32) -> Walk:
    """Return the tiles of the blocks that a block mask lists for `work`, whose first query is
    `first`."""
    of_block, lists = plan.config.block_keys // plan.layout.tile_n, work.lists
    masked, free = lists.partial_count * of_block, lists.full_count * of_block
    if first >= work.q_length:
        masked, free = Int32(0), Int32(0)
    nothing = Int32(0)
    return Walk(
        origin=nothing,
        right=nothing,
        right_end=nothing,
        left=nothing,
        left_end=nothing,
        sink=nothing,
        free=free,
        free_end=nothing,
        masked=masked,
        seen_end=work.kv_length,
        tiles=masked + free,
        lists=lists,
    )


@cute.jit
def listed_key(plan: AttentionPlan, walk: Walk, step: Int32) -> Int32:
    """Return the first key of the tile of step `step` of a listed walk."""
    keys, tile_n = plan.config.block_keys, plan.layout.tile_n
    of_block, lists = keys // tile_n, walk.lists
    number, part = step // of_block, step % of_block
    last = cute.size(lists.partial) - 1, cute.size(lists.full) - 1
    block = Int32(0)
    if step < walk.masked:
        block = lists.partial[cutlass.min(number, last[0])]
    else:
        place = cutlass.max(cutlass.min(number - lists.partial_count, last[1]), 0)
        block = lists.full[place]
    return block * keys + part * tile_n


@cute.jit
def hidden_steps(
    plan: AttentionPlan, work: Work, walk: Walk, scalars: Scalars, q_tile: Int32
) -> Int32:
    """Return the first steps of the walk whose keys no row of this CTA's query tile `q_tile` sees.

    At least one step remains if the walk has any. 0 if a block is one tile.
    """
    if cutlass.const_expr(plan.layout.block_tiles == 1):
        return Int32(0)
    first = first_token(plan, own_tile(plan, work, q_tile))
    hidden = Int32(0)
    if cutlass.const_expr(plan.config.right):
        end = row_end(work, first + plan.layout.box_tokens - 1, scalars)
        tiles = cute.ceil_div(cutlass.max(end - walk.origin, 0), plan.layout.tile_n)
        hidden = cutlass.max(cutlass.min(walk.right_end - tiles, walk.right), 0)
    if first >= work.q_length:
        hidden = walk.tiles
    return cutlass.max(cutlass.min(hidden, walk.tiles - 1), 0)


@cute.jit
def first_token(plan: AttentionPlan, tile: Int32) -> Int32:
    """Return the query of the entry with which tile `tile` begins, of a head or of heads sharing
    tiles.
    """
    return tile // plan.layout.head_parts * plan.layout.box_tokens


@cute.jit
def own_tile(plan: AttentionPlan, work: Work, q_tile: Int32) -> Int32:
    """Return the number of query tile `q_tile` of this CTA among the tiles of the head."""
    layout = plan.layout
    return work.q_block * layout.block_tiles + q_tile * plan.layout.ctas + work.rank


@cute.jit
def box_row(plan: AttentionPlan, work: Work, tile: Int32) -> Int32 | tuple[Int32, Int32]:
    """Return the first row of tile `tile` of a head in Q and O."""
    row = work.q_start + first_token(plan, tile)
    if cutlass.const_expr(plan.config.group == 1):
        return row
    return first_head(plan, tile), row


@cute.jit
def first_head(plan: AttentionPlan, tile: Int32) -> Int32:
    """Return the first head of tile `tile` among the heads that share tiles."""
    return tile % plan.layout.head_parts * plan.layout.box_heads


@cute.jit
def row_end(work: Work, token: Int32, scalars: Scalars) -> Int32:
    """Return the end of the keys that query `token` sees, if its right edge depends on it."""
    end = work.offset + token + scalars.window_right + 1
    return cutlass.max(cutlass.min(end, work.kv_length), 0)


@cute.jit
def row_begin(work: Work, token: Int32, scalars: Scalars) -> Int32:
    """Return the first key that query `token` sees, if its left edge depends on it; in a tree by
    its depth instead of its number."""
    return cutlass.max(work.offset + token - scalars.window_left, 0)


@cute.jit
def row_of(
    plan: AttentionPlan,
    work: Work,
    tensors: Globals,
    scalars: Scalars,
    q_tile: Int32,
    row: Int32,
) -> Row:
    """Return row `row` of query tile `q_tile` of this CTA, with the keys that it sees."""
    config = plan.config
    tile, heads = own_tile(plan, work, q_tile), plan.layout.box_heads
    token = first_token(plan, tile) + row // heads
    head = work.head * config.group + first_head(plan, tile) + row % heads
    if cutlass.const_expr(plan.layout.q_rows < plan.layout.rows):
        if row >= plan.layout.q_rows:
            token, head = work.q_length, work.head * config.group
    begin, end, sink_end, branch, spot = Int32(0), work.full_end, Int32(0), None, None
    depth = token
    if cutlass.const_expr(config.tree):
        branch = branch_of(plan, work, tensors, token)
        earlier = (Uint64(1) << cutlass.min(token, MAX_TREE_TOKENS - 1)) - 1
        depth = Int32(cute.arch.popc(branch.word & earlier))
    if cutlass.const_expr(config.right):
        end = row_end(work, token, scalars)
    if cutlass.const_expr(config.left):
        begin = row_begin(work, depth, scalars)
    if cutlass.const_expr(config.sink_tokens):
        sink_end = cutlass.min(scalars.sink_tokens, end)
    if cutlass.const_expr(config.has_mods):
        position = token  # with a block mask queries count from 0
        if cutlass.const_expr(config.block_keys == 0):
            position = cutlass.max(work.offset + token, 0)
        spot = Spot(work.batch, head, position)
    return Row(token, head, begin, end, sink_end, branch, spot)


@cute.jit
def branch_of(plan: AttentionPlan, work: Work, tensors: Globals, token: Int32) -> Branch:
    """Return which tokens of the tree query `token` sees; none if the entry lacks the query."""
    word = Int64(0)
    if token < work.q_length:
        row = entry_of_q(plan, work) * tensors.q_rows + work.q_start + token
        word = tensors.tables.tree[row]
    return Branch(Uint64(word), work.offset)


@cute.jit
def angle_row(work: Work, token: Int32, tables: Tables) -> Int32:
    """Return the row of the rope tables for query `token`; positions outside are clamped."""
    position = cutlass.min(work.offset + token, cute.size(tables.cos, mode=[0]) - 1)
    return cutlass.max(position, 0)


@cute.jit
def first_key(plan: AttentionPlan, walk: Walk, step: Int32) -> Int32:
    """Return the first key of the tile of step `step` of the walk, 0 <= step < walk.tiles."""
    if cutlass.const_expr(plan.config.block_keys > 0):
        return listed_key(plan, walk, step)
    tile, origin = walk.right_end - 1 - step, walk.origin
    if cutlass.const_expr(plan.config.left):
        if step >= walk.right:
            tile = walk.left_end - 1 - (step - walk.right)
        if cutlass.const_expr(plan.config.sink_tokens):
            if step >= walk.right + walk.left:
                tile = walk.masked - 1 - step
                origin = Int32(0)
        if step >= walk.masked:
            tile = walk.free_end - 1 - (step - walk.masked)
            origin = walk.origin
    return origin + tile * plan.layout.tile_n


@cute.jit
def entry_of_q(plan: AttentionPlan, work: Work) -> Int32:
    """Return the index of the entry in the last mode of query-side tensors; 0 if they
    are packed.
    """
    return Int32(0) if cutlass.const_expr(plan.config.varlen_q) else work.batch


@cute.jit
def stored_by_tma(plan: AttentionPlan, work: Work) -> Boolean:
    """Return whether TMA stores O: in a packed tensor only if its tiles overlap no other entry's
    rows.
    """
    by_tma = Boolean(True)
    if cutlass.const_expr(plan.config.varlen_q):
        last = (work.q_block + 1) * plan.layout.block_tiles - 1
        by_tma = first_token(plan, last) + plan.layout.box_tokens <= work.q_length
    return by_tma
