"""Which query block a CTA computes, and which key tiles that takes: loop bounds before masks
(device code).

Row r of an entry sees keys [begin(r), end(r)), both of which never decrease with r, and where
there are sink tokens also those below `sink_tokens` and end(r). So the tiles of a query block are
one range, whose partly visible tiles stand at its two ends, and a second range at the front for
the sink tokens. What lies between the two is never loaded.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from fmha.layout import TILE_M, TILE_N
from fmha.plan import AttentionPlan
from fmha.sm100.args import Globals, Scalars, Walk, Work


@cute.jit
def locate(plan: AttentionPlan, tensors: Globals) -> Work:
    """This CTA's work, its walk excepted.

    Grid: (query blocks times CTAs of each, query or KV heads, batch entries).
    """
    config, tables = plan.config, tensors.tables
    q_shape, k_shape = tensors.q_shape, tensors.k_shape
    q_block, head, batch = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    rank = Int32(0)
    if cutlass.const_expr(config.ctas > 1):
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        q_block, blocks = q_block // config.ctas, blocks // config.ctas
    if cutlass.const_expr(config.right):
        # Long rows first: the last CTAs to start are then the short ones.
        q_block = blocks - 1 - q_block
    group = q_shape[1] // k_shape[1]
    kv_head, first_head = head, head * group
    if cutlass.const_expr(not config.pack_heads):
        kv_head, first_head = head // group, head
    q_start, q_length = entry_range(tables.cu_seqlens_q, batch, q_shape[0])
    kv_start, kv_length = entry_range(tables.cu_seqlens_k, batch, k_shape[0])
    if cutlass.const_expr(config.page_size > 0):
        kv_length = cute.size(tables.page_table, mode=[1]) * config.page_size
    if cutlass.const_expr(config.kv_lens):
        kv_length = cutlass.max(cutlass.min(tables.kv_lens[batch], kv_length), 0)
    offset, full_end = kv_length - q_length, kv_length
    if cutlass.const_expr(config.q_offset):
        offset = tables.q_offset[batch]
        full_end = cutlass.max(cutlass.min(offset + q_length, kv_length), 0)
    return Work(
        q_block=q_block,
        head=first_head,
        kv_head=kv_head,
        group=group,
        batch=batch,
        q_start=q_start,
        q_length=q_length,
        kv_start=kv_start,
        kv_length=kv_length,
        offset=offset,
        full_end=full_end,
        rank=rank,
    )


@cute.jit
def entry_range(cu_seqlens: cute.Tensor | None, batch: Int32, rows: Int32) -> tuple[Int32, Int32]:
    """(first row of the tensor, rows) of a batch entry, packed or not."""
    start, length = Int32(0), Int32(rows)
    if cutlass.const_expr(cu_seqlens is not None):
        start = cu_seqlens[batch]
        length = cu_seqlens[batch + 1] - start
    return start, length


@cute.jit
def plan_walk(plan: AttentionPlan, work: Work, scalars: Scalars) -> Walk:
    """The key tiles of `work`, none where the CTA has no row."""
    config = plan.config
    rows = tile_rows(plan, work)
    first = work.q_block * plan.layout.block_rows
    last = cutlass.min(first + plan.layout.block_rows, rows) - 1
    if cutlass.const_expr(config.pack_heads):
        first, last = first // work.group, last // work.group
    first_end, last_end = work.full_end, work.full_end
    if cutlass.const_expr(config.right):
        first_end = row_end(work, first, scalars)
        last_end = row_end(work, last, scalars)
    first_begin, last_begin = Int32(0), Int32(0)
    if cutlass.const_expr(config.left):
        first_begin = row_begin(work, first, scalars)
        last_begin = row_begin(work, last, scalars)
    end = cute.ceil_div(last_end, TILE_N)
    if work.q_block * plan.layout.block_rows >= rows:
        end = Int32(0)
    begin = cutlass.min(first_begin // TILE_N, end)
    free_end = cutlass.max(cutlass.min(first_end // TILE_N, end), begin)
    free_begin = cutlass.max(cutlass.min(cute.ceil_div(last_begin, TILE_N), free_end), begin)
    sink = Int32(0)
    if cutlass.const_expr(config.sink_tokens):
        sink = cute.ceil_div(cutlass.min(scalars.sink_tokens, last_end), TILE_N)
        sink = cutlass.min(sink, begin)
    right, left = end - free_end, free_begin - begin
    return Walk(
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
def tile_rows(plan: AttentionPlan, work: Work) -> Int32:
    """Query rows of all blocks for this entry and head, or KV head where heads are packed."""
    rows = work.q_length
    if cutlass.const_expr(plan.config.pack_heads):
        rows = rows * work.group
    return rows


@cute.jit
def first_row(plan: AttentionPlan, work: Work, q_tile: Int32) -> Int32:
    """Row of the entry with which query tile `q_tile` of this CTA begins."""
    return work.q_block * plan.layout.block_rows + q_tile * TILE_M + work.rank * plan.layout.rows


@cute.jit
def row_end(work: Work, token: Int32, scalars: Scalars) -> Int32:
    """First key behind what query `token` sees, where its right edge moves with it."""
    end = work.offset + token + scalars.window_right + 1
    return cutlass.max(cutlass.min(end, work.kv_length), 0)


@cute.jit
def row_begin(work: Work, token: Int32, scalars: Scalars) -> Int32:
    """First key that query `token` sees, where its left edge moves with it."""
    return cutlass.max(work.offset + token - scalars.window_left, 0)


@cute.jit
def tile_of(plan: AttentionPlan, walk: Walk, step: Int32) -> Int32:
    """Key tile of step `step` of the walk, 0 <= step < walk.tiles."""
    tile = walk.right_end - 1 - step
    if cutlass.const_expr(plan.config.left):
        if step >= walk.right:
            tile = walk.left_end - 1 - (step - walk.right)
        if cutlass.const_expr(plan.config.sink_tokens):
            if step >= walk.right + walk.left:
                tile = walk.masked - 1 - step
        if step >= walk.masked:
            tile = walk.free_end - 1 - (step - walk.masked)
    return tile


@cute.jit
def entry_of_q(plan: AttentionPlan, work: Work) -> Int32:
    """Index of the entry in the last mode of the query-side tensors; packed ones have but one."""
    return Int32(0) if cutlass.const_expr(plan.config.varlen_q) else work.batch


@cute.jit
def stored_by_tma(plan: AttentionPlan, work: Work) -> Boolean:
    """O goes out by TMA: its rows are rows of one head, and a packed tensor holds no other entry's
    rows behind them."""
    by_tma = Boolean(True)
    if cutlass.const_expr(plan.config.pack_heads):
        by_tma = Boolean(False)
    elif cutlass.const_expr(plan.config.varlen_q):
        by_tma = (work.q_block + 1) * plan.layout.block_rows <= work.q_length
    return by_tma
