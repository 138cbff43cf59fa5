"""Load role: one warp fetches Q once, K and V piece by piece, and at the end stores O.

Pieces are fetched in the very order in which the MMA warp consumes them, so that no ring depth can
deadlock. All copies are boxes: rows by one panel (at most 128 bytes of each row, swizzled), which
is what lies in one place both in shared memory and in a page.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import cpasync

from fmha.layout import TILE_N
from fmha.plan import AttentionPlan
from fmha.sm100.args import Scope, TmaTensors, Walk, Work
from fmha.sm100.boxes import k_box, o_box, q_box, v_box
from fmha.sm100.walk import entry_of_q, first_row, stored_by_tma, tile_of
from kernelkit.boxes import BoxPosition, TmaTensor, copy_in, copy_out
from kernelkit.pipelines import consumer_state, producer_state


class Load:
    """Fills sQ and the K and V rings, empties sO. Rows beyond a tensor arrive as zeros."""

    def __init__(self, plan: AttentionPlan) -> None:
        self.plan = plan
        self.role = plan.roles["load"]

    @cute.jit
    def run(self, work: Work, walk: Walk, scope: Scope) -> None:
        """Whole life of the warp: as the MMA warp, V of a tile `lead` steps after its K."""
        pipes, layout, tma = scope.pipes, self.plan.layout, scope.tma
        for atom in descriptors(tma):
            cpasync.prefetch_descriptor(atom)
        k_stages, v_stages = layout.stages
        k_state, v_state = producer_state(k_stages), producer_state(v_stages)
        if cutlass.const_expr(scope.tma.q is not None):
            if walk.tiles > 0:
                for q_tile in cutlass.range_constexpr(self.plan.config.q_tiles):
                    self.fetch_q(work, scope, q_tile)
        for step in cutlass.range(walk.tiles + layout.lead, unroll=1):
            if step >= layout.lead:
                tile = tile_of(self.plan, walk, step - layout.lead)
                for piece in cutlass.range_constexpr(layout.v_pieces):
                    pipes.v.wait_free(v_state)
                    self.fetch_v(work, scope, tile, piece, v_state.index, step == layout.lead)
                    v_state.advance()
            if step < walk.tiles:
                tile = tile_of(self.plan, walk, step)
                for piece in cutlass.range_constexpr(layout.k_pieces):
                    pipes.k.acquire(k_state)
                    self.fetch_k(work, scope, tile, piece, k_state.index)
                    k_state.advance()
        if cutlass.const_expr(scope.tma.o is not None):
            if stored_by_tma(self.plan, work):
                self.store_o(work, scope)
        if cutlass.const_expr(self.plan.config.ctas == 2):
            # The leader's last releases reach into both CTAs, and have to find them alive.
            for _ in cutlass.range_constexpr(k_stages):
                pipes.k.wait_free(k_state)
                k_state.advance()
            for _ in cutlass.range_constexpr(v_stages):
                pipes.v.wait_free(v_state)
                v_state.advance()

    @cute.jit
    def fetch_q(self, work: Work, scope: Scope, q_tile: cutlass.Constexpr) -> None:
        """This CTA's rows of one query tile, all of the head dim."""
        scope.pipes.q.signal(q_tile)
        box = q_box(self.plan)
        row = work.q_start + first_row(self.plan, work, q_tile)
        panels = self.plan.config.head_dim // box.columns
        for panel in cutlass.range_constexpr(panels):
            column, entry = panel * box.columns, entry_of_q(self.plan, work)
            position = BoxPosition(row, column, work.head, entry)
            target = box.at(scope.buffers.q, q_tile * panels + panel)
            copy_in(scope.tma.q, box, position, target, scope.pipes.q.barrier(q_tile))

    @cute.jit
    def fetch_k(
        self, work: Work, scope: Scope, tile: Int32, piece: cutlass.Constexpr, stage: Int32
    ) -> None:
        """One piece of a K tile: a slice of the head dim of this CTA's keys."""
        box, layout = k_box(self.plan), self.plan.layout
        panels = layout.k_columns // box.columns
        boxes_per_panel = layout.k_rows // box.rows
        barrier = scope.pipes.k.barrier(stage)
        for part in cutlass.range(boxes_per_panel, unroll=1):
            key = work.rank * layout.k_rows + part * box.rows
            row, entry = self.key_position(work, scope, tile, key)
            for panel in cutlass.range_constexpr(panels):
                column = piece * layout.k_columns + panel * box.columns
                slot = (stage * panels + panel) * boxes_per_panel + part
                target = box.at(scope.buffers.k, slot)
                position = BoxPosition(row, column, work.kv_head, entry)
                copy_in(scope.tma.k, box, position, target, barrier)

    @cute.jit
    def fetch_v(
        self,
        work: Work,
        scope: Scope,
        tile: Int32,
        piece: cutlass.Constexpr,
        stage: Int32,
        first: Boolean,
    ) -> None:
        """One piece of a V tile: a slice of its columns, all keys.

        Rows of the first tile may have to be cleared by those who correct O. So its bytes are
        announced to them (the tail edge), and the ring's barrier only counts the round.
        """
        pipes, tma = scope.pipes, scope.tma
        if cutlass.const_expr(not self.plan.config.ragged_keys):
            pipes.v.signal(stage)
            self.copy_v(work, scope, tile, piece, stage, tma.v, pipes.v.barrier(stage))
        elif first:
            if cutlass.const_expr(piece == 0):
                pipes.tail.signal(0)
            pipes.v.signal_without_bytes(stage)
            self.copy_v(work, scope, tile, piece, stage, tma.tail, pipes.tail.barrier(0))
        else:
            pipes.v.signal(stage)
            self.copy_v(work, scope, tile, piece, stage, tma.v, pipes.v.barrier(stage))

    @cute.jit
    def copy_v(
        self,
        work: Work,
        scope: Scope,
        tile: Int32,
        piece: cutlass.Constexpr,
        stage: Int32,
        tma: TmaTensor,
        barrier: cute.Pointer,
    ) -> None:
        """Start the boxes of one piece of V, whose bytes complete on `barrier`."""
        box, layout = v_box(self.plan), self.plan.layout
        panels = layout.v_columns // box.columns
        boxes_per_panel = TILE_N // box.rows
        for part in cutlass.range(boxes_per_panel, unroll=1):
            row, entry = self.key_position(work, scope, tile, part * box.rows)
            # Not unrolled: the addresses of all boxes at once are registers that this role lacks.
            for panel in cutlass.range(panels, unroll=1):
                column = piece * layout.o_tile + work.rank * layout.v_columns + panel * box.columns
                slot = (stage * panels + panel) * boxes_per_panel + part
                target = box.at(scope.buffers.v, slot)
                position = BoxPosition(row, column, work.kv_head, entry)
                copy_in(tma, box, position, target, barrier)

    @cute.jit
    def key_position(
        self, work: Work, scope: Scope, tile: Int32, key: Int32
    ) -> tuple[Int32, Int32]:
        """(row, batch entry or page) of key `key` of a tile, where a box of keys begins.

        Pages behind the length are not looked up: a page that does not exist arrives as zeros.
        """
        position = tile * TILE_N + key
        if cutlass.const_expr(self.plan.config.page_size > 0):
            size = self.plan.config.page_size
            page = cute.size(scope.tma.k.tensor, mode=[3])
            if position < work.kv_length:
                page = scope.tensors.tables.page_table[work.batch, position // size]
            return position % size, page
        if cutlass.const_expr(self.plan.config.varlen_k):
            return work.kv_start + position, Int32(0)
        return position, work.batch

    @cute.jit
    def store_o(self, work: Work, scope: Scope) -> None:
        """O piece by piece as it is handed over; rows beyond the tensor are dropped."""
        box, layout, q_tiles = o_box(self.plan), self.plan.layout, self.plan.config.q_tiles
        panels = layout.o_tile // box.columns
        for q_tile in cutlass.range_constexpr(q_tiles):
            row = work.q_start + first_row(self.plan, work, q_tile)
            for piece in cutlass.range_constexpr(layout.v_pieces):
                number = q_tile * layout.v_pieces + piece
                scope.pipes.out.wait(consumer_state(1), number)
                for panel in cutlass.range_constexpr(panels):
                    column = (piece * panels + panel) * box.columns
                    source = box.at(scope.buffers.o, number * panels + panel)
                    entry = entry_of_q(self.plan, work)
                    position = BoxPosition(row, column, work.head, entry)
                    copy_out(scope.tma.o, box, position, source)
        cute.arch.cp_async_bulk_commit_group()
        # The shared memory is this CTA's until the copies have read it.
        cute.arch.cp_async_bulk_wait_group(0, read=True)


def descriptors(tma: TmaTensors) -> list[cute.CopyAtom]:
    """The copies that this config makes."""
    every = (tma.q, tma.k, tma.v, tma.tail, tma.o)
    return [copy.atom for copy in every if copy is not None]
