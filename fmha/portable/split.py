"""What every warp does where a team has several: each has a slice of the head dim.

It sums Q K^T over its slice, the team adds these up, a warp weighs 16 of the team's rows, and each
adds P V of all rows to its slice of O. A CTA meets once for a key tile: then the tile is there, and
all are done with the one before, whose place the next one takes.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fmha.portable.args import Place, Scope, Seen, Tile, Weights
from fmha.portable.epilogue import store_o
from fmha.portable.exchange import (
    add_up,
    meet_team,
    own_tile,
    take_weights,
    tell_factors,
    tell_weights,
    told_factors,
)
from fmha.portable.math import Math
from fmha.portable.products import accumulators, multiply_pv, multiply_qk
from fmha.portable.rows import own_lane
from fmha.portable.softmax import follow_maximum, make_weights, prepare, weigh
from fmha.shared.args import Walk, Work
from fmha.shared.epilogue import finish_rows
from fmha.shared.statistics import own_sink
from fmha.shared.two_rows import largest, make_reference, over_lanes, take_up
from fmha.shared.walk import first_key


class SliceMath(Math):
    """A warp weighs 16 of the team's rows, and has a slice of the columns of O of all of them."""

    @cute.jit
    def sweep(self, scope: Scope, work: Work, walk: Walk, place: Place, tile: Tile) -> None:
        """All key tiles of a block."""
        stages, _ = self.plan.layout.stages
        for stage in cutlass.range_constexpr(stages - 1):
            self.fetch(scope, work, walk, place, Int32(stage), Int32(stage))
        stage = Int32(0)
        for step in cutlass.range(walk.tiles, unroll=1):
            cute.arch.cp_async_wait_group(stages - 2)
            cute.arch.sync_threads()
            coming = stage - 1 if stage > 0 else Int32(stages - 1)
            self.fetch(scope, work, walk, place, step + (stages - 1), coming)
            self.take(scope, work, walk, place, tile, step, stage)
            stage = stage + 1 if stage < stages - 1 else Int32(0)
        cute.arch.cp_async_wait_group(0)

    @cute.jit
    def take(
        self,
        scope: Scope,
        work: Work,
        walk: Walk,
        place: Place,
        tile: Tile,
        step: Int32,
        stage: Int32,
    ) -> None:
        """One key tile."""
        plan, buffers, reference = self.plan, scope.buffers, tile.references[0]
        own, p = tile.part.scores[0], tile.part.p
        partial = accumulators(plan, plan.layout.tile_n)
        multiply_qk(plan, partial, None, place, stage)
        add_up(plan, partial, own, place, buffers)
        seen = Seen(work, place, first_key(plan, walk, step), step < walk.masked)
        prepare(plan, scope, seen, own, reference, own_tile(plan, place))
        moved, factors = follow_maximum(plan, scope, largest(plan, own, reference), reference)
        take_up(reference, weigh(plan, scope, own, p[0], reference))
        tell_weights(plan, p[0], moved, factors, place, buffers)
        meet_team(plan, place)
        take_weights(plan, p, tile.o, place, buffers)
        multiply_pv(plan, tile.o, p, place, stage, Int32(0))

    @cute.jit
    def finish(self, scope: Scope, work: Work, place: Place, tile: Tile) -> None:
        """What the rows leave, to global memory: statistics by who weighed them."""
        plan, buffers, reference = self.plan, scope.buffers, tile.references[0]
        row_tile, row_tiles = own_tile(plan, place), plan.layout.shape.row_tiles
        own = own_lane(plan, work, scope.scalars, place, row_tile, place.slice // row_tiles)
        sinks = [own_sink(plan, row.head, scope.tensors) for row in own.rows]
        over_lanes(reference.row_sum)
        factors = finish_rows(plan, work, own, reference, sinks, scope)
        meet_team(plan, place)  # nobody reads factors of the block before any more
        tell_factors(plan, factors, place, buffers)
        meet_team(plan, place)
        for part in cutlass.range_constexpr(len(tile.o)):
            lane = own_lane(plan, work, scope.scalars, place, Int32(part), place.slice)
            store_o(plan, work, lane, tile.o[part], told_factors(place, buffers, part), scope)

    @cute.jit
    def make_tile(self) -> Tile:
        plan, keys = self.plan, self.plan.layout.tile_n
        whole = Weights(accumulators(plan, keys)[:1], make_weights(plan, keys))
        o = accumulators(plan, plan.layout.o_columns)
        return Tile(whole, o, (make_reference(plan),))
