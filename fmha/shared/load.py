"""Load roles: one warp fetches Q and K, another V, piece by piece, block after block.

There are two warps since the MMA warp consumes V of a tile after K of the next ones. So neither
warp waits for room that only the other's data can free.

All copies are boxes: rows by one panel, at most 128 bytes of each row. The lines of a panel are
swizzled inside themselves (`kernelkit.device.boxes`). A panel is contiguous both in shared memory
and in a page. Boxes of one buffer follow each other without gaps.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.pipeline import PipelineState

from fmha.plan import AttentionPlan
from fmha.shared.args import IO_TYPES, OUT_TYPES, Scope, Work
from fmha.shared.walk import (
    box_row,
    count_rounds,
    entry_of_q,
    first_key,
    locate,
    own_tile,
    plan_walk,
)
from fmha.tiles import Tiles
from kernelkit.device.boxes import Box, BoxPosition, TmaTensor, copy_in
from kernelkit.device.pipelines import PAIR_MASK, producer_state
from kernelkit.device.umma import shared


def q_box(plan: AttentionPlan) -> Box:
    """Return the box of Q: this CTA's rows of a query tile, without the unused rows."""
    layout, config = plan.layout, plan.config
    columns = layout.panel(layout.k_columns, config.q_item_bytes)
    return Box(layout.q_rows, columns, IO_TYPES[config.dtype])


def k_box(plan: AttentionPlan) -> Box:
    """Return the box of K: the keys that the CTA fetches, or as many of them as one page holds."""
    layout, config = plan.layout, plan.config
    return Box(
        layout.box_keys(layout.k_rows), layout.panel(layout.k_columns), IO_TYPES[config.keys_dtype]
    )


def v_box(plan: AttentionPlan) -> Box:
    """Return the box of V: the keys that the CTA fetches, or as many of them as one page holds."""
    layout, config = plan.layout, plan.config
    return Box(
        layout.box_keys(layout.tile_n), layout.panel(layout.v_columns), IO_TYPES[config.keys_dtype]
    )


def o_box(plan: AttentionPlan) -> Box:
    """Return the box of O, with the rows of `q_box`."""
    return Box(plan.layout.q_rows, plan.layout.o_panel, OUT_TYPES[plan.config.o_dtype])


def panel_at(layout: Tiles, box: Box, buffer: cute.Pointer, index: Int32) -> cute.Tensor:
    """Return the box of rows in panel `index` of the query tiles; the panel stride
    covers all rows.
    """
    return shared(buffer + index * (layout.rows * box.columns), box.layout())


class LoadQK:
    """Fills sQ and the K ring. Rows beyond a tensor arrive as zeros."""

    def __init__(self, plan: AttentionPlan) -> None:
        self.plan = plan
        self.role = plan.roles["load_qk"]

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warp."""
        pipes, layout, tma = scope.pipes, self.plan.layout, scope.tma
        q_tiles, order = self.plan.layout.q_tiles, scope.tensors.order
        for copy in (tma.q, tma.k):
            cpasync.prefetch_descriptor(copy.atom)
        k_stages, _ = layout.stages
        q_state, k_state = producer_state(1), producer_state(k_stages)
        for turn in cutlass.range(count_rounds(self.plan, order), unroll=1):
            work = locate(self.plan, scope.tensors, turn)
            walk = plan_walk(self.plan, work, scope.scalars)
            for step in cutlass.range(walk.tiles, unroll=1):
                key = first_key(self.plan, walk, step)
                if step == 0:
                    self.fetch_q(work, scope, q_state, 0)
                for piece in cutlass.range_constexpr(layout.k_pieces):
                    pipes.k.acquire(k_state)
                    self.fetch_k(work, scope, key, piece, k_state.index)
                    k_state.advance()
                if step == 0:
                    for q_tile in cutlass.range_constexpr(1, q_tiles):
                        self.fetch_q(work, scope, q_state, q_tile)
            if walk.tiles > 0:
                q_state.advance()
        if cutlass.const_expr(self.plan.layout.ctas == 2):
            # The leader's last releases reach into both CTAs, and have to find them alive.
            for _ in cutlass.range_constexpr(k_stages):
                pipes.k.wait_free(k_state)
                k_state.advance()
            pipes.q.wait_free(q_state)

    @cute.jit
    def fetch_q(
        self, work: Work, scope: Scope, state: PipelineState, q_tile: cutlass.Constexpr
    ) -> None:
        """Fetch this CTA's rows of one query tile, the whole head dim; the state is read only."""
        scope.pipes.q.wait_free(state, q_tile)
        scope.pipes.q.signal(q_tile)
        box = q_box(self.plan)
        tile = own_tile(self.plan, work, q_tile)
        row = box_row(self.plan, work, tile)
        panels = self.plan.config.head_dim // box.columns
        for panel in cutlass.range_constexpr(panels):
            column, entry = panel * box.columns, entry_of_q(self.plan, work)
            position = BoxPosition(row, column, work.head, entry)
            target = panel_at(self.plan.layout, box, scope.buffers.q, q_tile * panels + panel)
            copy_in(scope.tma.q, box, position, target, scope.pipes.q.barrier(q_tile))

    @cute.jit
    def fetch_k(
        self, work: Work, scope: Scope, first: Int32, piece: cutlass.Constexpr, stage: Int32
    ) -> None:
        """Fetch one piece of a K tile: a slice of the head dim of this CTA's keys."""
        box, layout = k_box(self.plan), self.plan.layout
        panels = layout.k_columns // box.columns
        boxes_per_panel = layout.k_rows // box.rows
        barrier = scope.pipes.k.barrier(stage)
        begin, end = own_boxes(self.plan, work, boxes_per_panel)
        for part in cutlass.range(begin, end, unroll=1):
            key = first + own_part(self.plan, work) * layout.k_rows + part * box.rows
            row, entry = key_position(self.plan, work, scope, key)
            for panel in cutlass.range_constexpr(panels):
                column = piece * layout.k_columns + panel * box.columns
                slot = (stage * panels + panel) * boxes_per_panel + part
                target = box.at(scope.buffers.k, slot)
                position = BoxPosition(row, column, work.kv_head, entry)
                copy_in(scope.tma.k, box, position, target, barrier, cast_mask(self.plan))


class LoadV:
    """Fills the V ring. Rows beyond a tensor arrive as zeros."""

    def __init__(self, plan: AttentionPlan) -> None:
        self.plan = plan
        self.role = plan.roles["load_v"]

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warp."""
        pipes, layout, tma = scope.pipes, self.plan.layout, scope.tma
        for copy in (tma.v, tma.tail):
            if cutlass.const_expr(copy is not None):
                cpasync.prefetch_descriptor(copy.atom)
        _, v_stages = layout.stages
        v_state, tail_state = producer_state(v_stages), producer_state(1)
        rounds = count_rounds(self.plan, scope.tensors.order)
        for turn in cutlass.range(rounds, unroll=1):
            work = locate(self.plan, scope.tensors, turn)
            walk = plan_walk(self.plan, work, scope.scalars)
            for step in cutlass.range(walk.tiles, unroll=1):
                key = first_key(self.plan, walk, step)
                if cutlass.const_expr(pipes.tail is not None):
                    if step == 0:
                        pipes.tail.wait_free(tail_state)
                for piece in cutlass.range_constexpr(layout.v_pieces):
                    pipes.v.wait_free(v_state)
                    self.fetch_v(work, scope, key, piece, v_state.index, step == 0)
                    v_state.advance()
            if walk.tiles > 0:
                tail_state.advance()
        if cutlass.const_expr(self.plan.layout.ctas == 2):
            # The leader's last releases reach into both CTAs, and have to find them alive.
            for _ in cutlass.range_constexpr(v_stages):
                pipes.v.wait_free(v_state)
                v_state.advance()

    @cute.jit
    def fetch_v(
        self,
        work: Work,
        scope: Scope,
        key: Int32,
        piece: cutlass.Constexpr,
        stage: Int32,
        first: Boolean,
    ) -> None:
        """Fetch one piece of a V tile: a slice of its columns, all keys.

        The correction warps may have to clear rows of the first tile. So its bytes complete on
        their barrier (the tail edge), and the ring's barrier only counts the phase.
        """
        pipes, tma = scope.pipes, scope.tma
        if cutlass.const_expr(pipes.tail is None):
            pipes.v.signal(stage)
            self.copy_v(work, scope, key, piece, stage, tma.v, pipes.v.barrier(stage))
        elif first:
            if cutlass.const_expr(piece == 0):
                pipes.tail.signal(0)
            pipes.v.signal_without_bytes(stage)
            self.copy_v(work, scope, key, piece, stage, tma.tail, pipes.tail.barrier(0))
        else:
            pipes.v.signal(stage)
            self.copy_v(work, scope, key, piece, stage, tma.v, pipes.v.barrier(stage))

    @cute.jit
    def copy_v(
        self,
        work: Work,
        scope: Scope,
        first: Int32,
        piece: cutlass.Constexpr,
        stage: Int32,
        tma: TmaTensor,
        barrier: cute.Pointer,
    ) -> None:
        """Start the copies of the boxes of one piece of V, whose bytes complete on `barrier`."""
        box, layout = v_box(self.plan), self.plan.layout
        panels = layout.v_columns // box.columns
        boxes_per_panel = layout.tile_n // box.rows
        shift = piece * layout.o_tile + own_part(self.plan, work) * layout.v_columns
        begin, end = own_boxes(self.plan, work, boxes_per_panel)
        for part in cutlass.range(begin, end, unroll=1):
            row, entry = key_position(self.plan, work, scope, first + part * box.rows)
            # Not unrolled: this role lacks registers for the addresses of all boxes at once.
            for panel in cutlass.range(panels, unroll=1):
                column = shift + panel * box.columns
                slot = (stage * panels + panel) * boxes_per_panel + part
                target = box.at(scope.buffers.v, slot)
                position = BoxPosition(row, column, work.kv_head, entry)
                copy_in(tma, box, position, target, barrier, cast_mask(self.plan))


@cute.jit
def own_boxes(plan: AttentionPlan, work: Work, boxes: cutlass.Constexpr) -> tuple[Int32, Int32]:
    """Return the range [begin, end) of the boxes of a panel that this CTA fetches."""
    if cutlass.const_expr(not plan.layout.multicast):
        return Int32(0), Int32(boxes)
    share = boxes // plan.layout.ctas
    return work.rank * share, (work.rank + 1) * share


@cute.jit
def own_part(plan: AttentionPlan, work: Work) -> Int32:
    """Return which part of a piece this CTA's shared memory holds; 0 if it holds the
    whole piece.
    """
    return Int32(0) if cutlass.const_expr(plan.layout.multicast) else work.rank


def cast_mask(plan: AttentionPlan) -> int | None:
    """Return the mask of the CTAs that receive a multicast fetch; None without multicast."""
    return PAIR_MASK if plan.layout.multicast else None


@cute.jit
def key_position(
    plan: AttentionPlan, work: Work, scope: Scope, position: Int32
) -> tuple[Int32, Int32]:
    """Return (row, batch entry or page) of the key where a box begins.

    Pages past the length are not looked up: a page that does not exist arrives as zeros.
    """
    if cutlass.const_expr(plan.config.page_size > 0):
        size = plan.config.page_size
        page = cute.size(scope.tma.k.tensor, mode=[3])
        if position < work.kv_length:
            page = scope.tensors.tables.page_table[work.batch, position // size]
        return position % size, page
    if cutlass.const_expr(plan.config.varlen_k):
        return work.kv_start + position, Int32(0)
    return position, work.batch
