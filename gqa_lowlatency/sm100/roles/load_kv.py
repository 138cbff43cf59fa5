"""Load role of K and V: one warp fetches pieces by TMA, in the order in which the MMA warp takes
them: K of a tile, then V of the tile before. So no depth of the ring can deadlock.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from gqa_lowlatency.shared.split import tile_start
from gqa_lowlatency.sm100.args import Scope
from gqa_lowlatency.sm100.boxes import kv_box
from gqa_lowlatency.sm100.plan import ROLES, TILE, Plan100
from kernelkit.device.boxes import BoxPosition, TmaTensor, copy_in
from kernelkit.device.pipelines import producer_state
from kernelkit.plan import hw


class LoadKV:
    """Fills the ring."""

    def __init__(self, plan: Plan100) -> None:
        self.plan = plan
        self.role = ROLES["load_kv"]
        self.boxes = TILE // plan.box_rows
        self.words = -(-self.boxes // hw.WARP_THREADS)  # of a lane, to remember them all

    @cute.jit
    def begin(self, scope: Scope) -> None:
        """K of the first tile, by the warp that has initialised the barriers, before the CTA has
        met: memory answers meanwhile."""
        if scope.share.count > 0:
            where = cute.make_rmem_tensor(self.words, Int32)
            self.look_up(scope, Int32(0), where)
            for piece in cutlass.range_constexpr(self.plan.pieces):
                scope.pipes.kv.signal(piece)
                self.fetch(scope, scope.k, Int32(0), piece, where, Int32(piece))

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warp. Pages are looked up a step before they are needed."""
        plan, pipes, share = self.plan, scope.pipes, scope.share
        state = producer_state(plan.stages)
        k_where = cute.make_rmem_tensor(self.words, Int32)
        v_where = cute.make_rmem_tensor(self.words, Int32)
        self.look_up(scope, Int32(0), v_where)
        self.look_up(scope, Int32(1), k_where)
        for _ in cutlass.range_constexpr(plan.pieces):  # K of the first tile is on its way
            state.advance()
        for step in cutlass.range(1, share.count + 1, unroll=1):
            if step < share.count:
                for piece in cutlass.range_constexpr(plan.pieces):
                    pipes.kv.acquire(state)
                    self.fetch(scope, scope.k, step, piece, k_where, state.index)
                    state.advance()
            for piece in cutlass.range_constexpr(plan.pieces):
                pipes.kv.acquire(state)
                self.fetch(scope, scope.v, step - 1, piece, v_where, state.index)
                state.advance()
            v_where.store(k_where.load())
            self.look_up(scope, step + 1, k_where)
        if cutlass.const_expr(plan.config.pdl):
            cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def fetch(
        self,
        scope: Scope,
        source: TmaTensor,
        step: Int32,
        piece: cutlass.Constexpr,
        where: cute.Tensor,
        stage: Int32,
    ) -> None:
        """A piece of the head of tile `step` of the share; where: what `look_up` found of it."""
        plan = self.plan
        box, panels = kv_box(plan), plan.piece_columns // plan.panel
        barrier = scope.pipes.kv.barrier(stage)
        for word in cutlass.range_constexpr(self.words):
            for lane in cutlass.range(min(self.boxes, hw.WARP_THREADS), unroll=1):
                index = word * hw.WARP_THREADS + lane
                row, entry = self.first_key(scope, step), where[word]
                if cutlass.const_expr(plan.config.page_size > 0):
                    row = self.row_in_page(row, index)
                    entry = cute.arch.shuffle_sync(where[word], lane)
                for panel in cutlass.range_constexpr(panels):
                    column = piece * plan.piece_columns + panel * plan.panel
                    slot = (stage * panels + panel) * self.boxes + index
                    position = BoxPosition(row, column, scope.place.head, entry)
                    copy_in(source, box, position, box.at(scope.buffers.ring, slot), barrier)

    @cute.jit
    def row_in_page(self, first: Int32, index: Int32) -> Int32:
        """Where box `index` of the tile that begins with key `first` begins in its page."""
        row = Int32(0)
        if cutlass.const_expr(self.plan.box_rows < self.plan.config.page_size):
            row = (first + index * self.plan.box_rows) % self.plan.config.page_size
        return row

    @cute.jit
    def first_key(self, scope: Scope, step: Int32) -> Int32:
        """Of a tile of the share."""
        return tile_start(scope.share, scope.share.begin + step, TILE)

    @cute.jit
    def look_up(self, scope: Scope, step: Int32, where: cute.Tensor) -> None:
        """Look up where the boxes of a tile are: the batch entry, or in lane l the pages of boxes
        l, l + 32, ...

        The table is not asked for a page that no row sees: a page that does not exist arrives as
        zeros.
        """
        config, share = self.plan.config, scope.share
        where.fill(scope.place.entry)
        if cutlass.const_expr(config.page_size > 0):
            for word in cutlass.range_constexpr(self.words):
                index = word * hw.WARP_THREADS + cute.arch.lane_idx()
                key = self.first_key(scope, step) + index * self.plan.box_rows
                seen = (step < share.count) & (index < self.boxes) & (key < share.n_keys)
                if cutlass.const_expr(config.has_begin):
                    inside = key + self.plan.box_rows > share.lowest
                    if cutlass.const_expr(config.sink_tokens):
                        inside = inside | (key < share.sink_end)
                    seen = seen & inside
                where[word] = cute.size(scope.k.tensor, mode=[3])
                if seen:
                    where[word] = scope.tables.pages[scope.place.entry, key // config.page_size]
