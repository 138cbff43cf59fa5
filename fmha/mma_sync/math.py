"""What every warp does where its query rows are its own: S = Q K^T, softmax, O += P V, key tile by
key tile, and O on its way out.

The tensor core takes a product every few cycles, and between two of them a warp has time for what
else there is to do, if that does not wait for them. So a key tile is two halves: while S of one half
is computed, the other's is weighed, and while P V of one half is added to O, the maxima of the other
are found. A CTA meets once for a key tile: then V of the tile is there and K of the next one, and
all are done with what the tiles after them are written over.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fmha.device.args import Walk, Work
from fmha.device.epilogue import finish_rows
from fmha.device.order import count_rounds
from fmha.device.statistics import own_sink
from fmha.device.two_rows import make_reference, over_lanes, rescale
from fmha.device.walk import first_key, locate, plan_walk
from fmha.mma_sync.args import Half, Place, Scope, Tile
from fmha.mma_sync.branch import once
from fmha.mma_sync.epilogue import store_o
from fmha.mma_sync.fetch import fetch_k, fetch_q, fetch_v
from fmha.mma_sync.plan import PortablePlan
from fmha.mma_sync.products import accumulators, multiply_pv, multiply_qk, own_place
from fmha.mma_sync.rows import own_lane
from fmha.mma_sync.softmax import begin_rows, follow_maximum, make_weights, prepare, weigh


class Math:
    """Whole life of a warp; a subclass says how it sweeps the keys of a block."""

    def __init__(self, plan: PortablePlan) -> None:
        self.plan = plan

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Block after block."""
        plan = self.plan
        place = own_place(plan, scope)
        tile = self.make_tile()
        for turn in cutlass.range(count_rounds(plan, scope.tensors.order), unroll=1):
            work = locate(plan, scope.tensors, turn)
            walk = plan_walk(plan, work, scope.scalars)
            for part in cutlass.range_constexpr(len(tile.references)):
                begin_rows(tile.references[part])
            for part in cutlass.range_constexpr(len(tile.o)):
                tile.o[part].fill(0.0)
            if walk.tiles > 0:
                cute.arch.sync_threads()  # nobody reads tiles of the block before any more
                fetch_q(plan, work, scope, place)
                self.sweep(scope, work, walk, place, tile)
            self.finish(scope, work, place, tile)


class RowMath(Math):
    """A warp weighs all rows of its team, and has all columns of their O."""

    @cute.jit
    def sweep(self, scope: Scope, work: Work, walk: Walk, place: Place, tile: Tile) -> None:
        """All key tiles of a block."""
        plan, first, second = self.plan, tile.halves[0], tile.halves[1]
        self.fetch(scope, work, walk, place, Int32(0), Int32(-1))
        self.fetch(scope, work, walk, place, Int32(1), Int32(0))
        cute.arch.cp_async_wait_group(1)
        cute.arch.sync_threads()
        multiply_qk(plan, first.scores, place, Int32(0), 0)
        self.prepare(scope, work, walk, place, tile, 0, Int32(0))
        self.follow(scope, tile, 0)
        multiply_qk(plan, second.scores, place, Int32(0), 1)
        self.weigh(scope, tile, 0)
        self.prepare(scope, work, walk, place, tile, 1, Int32(0))
        stage = Int32(0)
        for step in cutlass.range(walk.tiles - 1, unroll=1):
            self.meet(scope, work, walk, place, step)
            multiply_pv(plan, tile.o, first.p, place, stage, 0)
            self.follow(scope, tile, 1)
            multiply_qk(plan, first.scores, place, 1 - stage, 0)
            self.weigh(scope, tile, 1)
            self.prepare(scope, work, walk, place, tile, 0, step + 1)
            multiply_pv(plan, tile.o, second.p, place, stage, 1)
            self.follow(scope, tile, 0)
            multiply_qk(plan, second.scores, place, 1 - stage, 1)
            self.weigh(scope, tile, 0)
            self.prepare(scope, work, walk, place, tile, 1, step + 1)
            stage = 1 - stage
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        multiply_pv(plan, tile.o, first.p, place, stage, 0)
        self.follow(scope, tile, 1)
        self.weigh(scope, tile, 1)
        multiply_pv(plan, tile.o, second.p, place, stage, 1)

    @cute.jit
    def meet(self, scope: Scope, work: Work, walk: Walk, place: Place, step: Int32) -> None:
        """All threads: V of the tile of `step` is there, and K of the next one; those behind them
        begin to come."""
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        self.fetch(scope, work, walk, place, step + 2, step + 1)

    @cute.jit
    def fetch(
        self, scope: Scope, work: Work, walk: Walk, place: Place, k_step: Int32, v_step: Int32
    ) -> None:
        """Begin to fetch K of one tile, if there is one, and V of another, if it is one."""
        plan = self.plan
        if k_step < walk.tiles:
            key = first_key(plan, walk, k_step)
            fetch_k(plan, work, walk, scope, place.thread, key, k_step % 2)
        if v_step >= 0:
            key = first_key(plan, walk, v_step)
            fetch_v(plan, work, walk, scope, place.thread, key, v_step % 2)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def prepare(
        self,
        scope: Scope,
        work: Work,
        walk: Walk,
        place: Place,
        tile: Tile,
        half: cutlass.Constexpr,
        step: Int32,
    ) -> None:
        """S of a half of the tile of `step` as it is to be weighed."""
        plan, scores = self.plan, tile.halves[half].scores
        for part in cutlass.range_constexpr(len(scores)):
            lane = own_lane(plan, work, scope.scalars, place, Int32(part), Int32(0))
            key = first_key(plan, walk, step) + half * plan.layout.half_n
            reference = tile.references[part]
            prepare(plan, scope, lane, scores[part], reference, key, step < walk.masked)

    @cute.jit
    def follow(self, scope: Scope, tile: Tile, half: cutlass.Constexpr) -> None:
        """The maxima of a half, and O as they ask for it."""
        for part in cutlass.range_constexpr(len(tile.o)):
            scores, reference = tile.halves[half].scores[part], tile.references[part]
            moved, factors = follow_maximum(self.plan, scope, scores, reference)
            for _ in cutlass.range(once(moved), unroll=1):
                rescale(tile.o[part], factors)

    @cute.jit
    def weigh(self, scope: Scope, tile: Tile, half: cutlass.Constexpr) -> None:
        own = tile.halves[half]
        for part in cutlass.range_constexpr(len(tile.o)):
            weigh(self.plan, scope, own.scores[part], own.p[part], tile.references[part])

    @cute.jit
    def finish(self, scope: Scope, work: Work, place: Place, tile: Tile) -> None:
        """What the rows leave, to global memory."""
        plan = self.plan
        for part in cutlass.range_constexpr(len(tile.o)):
            reference = tile.references[part]
            lane = own_lane(plan, work, scope.scalars, place, Int32(part), Int32(0))
            sinks = [own_sink(plan, row.head, scope.tensors) for row in lane.rows]
            over_lanes(reference.row_sum)
            factors = finish_rows(plan, work, lane, reference, sinks, scope)
            store_o(plan, work, lane, tile.o[part], factors, scope)

    @cute.jit
    def make_tile(self) -> Tile:
        plan, row_tiles = self.plan, self.plan.layout.shape.row_tiles
        keys = plan.layout.half_n
        return Tile(
            tuple(Half(accumulators(plan, keys), make_weights(plan, keys)) for _ in range(2)),
            accumulators(plan, plan.layout.o_columns),
            tuple(make_reference(plan) for _ in range(row_tiles)),
        )
