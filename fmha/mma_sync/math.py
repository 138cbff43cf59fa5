"""What every warp does: S = Q K^T, softmax, O += P V, tile by tile, and O on its way out.

A CTA meets once for a key tile: then the tile is there, and all are done with the one before, whose
place the next one takes while this one is computed. Between two such meetings warps go their own
way, and where an SM holds two CTAs, or a scheduler two warps, the softmax of one runs beside the
products of another.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from fmha.device.args import Walk, Work
from fmha.device.epilogue import finish_rows
from fmha.device.order import count_rounds
from fmha.device.statistics import own_sink
from fmha.device.two_rows import (
    Reference,
    exponentiate,
    largest,
    make_reference,
    mask,
    over_lanes,
    refer_to,
    rescale,
    round_weights,
    softcap,
    take_up,
    tile_sums,
)
from fmha.device.types import IO_TYPES
from fmha.device.walk import first_key, locate, plan_walk
from fmha.mma_sync.args import Place, Scope, Tile
from fmha.mma_sync.branch import once
from fmha.mma_sync.epilogue import store_o
from fmha.mma_sync.exchange import (
    add_up,
    meet_team,
    own_tile,
    take_weights,
    tell_factors,
    tell_weights,
    told_factors,
)
from fmha.mma_sync.fetch import fetch_keys, fetch_q
from fmha.mma_sync.plan import PortablePlan
from fmha.mma_sync.products import accumulators, multiply_pv, multiply_qk, own_place
from fmha.mma_sync.rows import own_lane


class Math:
    """Teams of one warp."""

    def __init__(self, plan: PortablePlan) -> None:
        self.plan = plan

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warps."""
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
                self.sweep(scope, work, walk, place, tile)
            self.finish(scope, work, place, tile)

    @cute.jit
    def sweep(self, scope: Scope, work: Work, walk: Walk, place: Place, tile: Tile) -> None:
        """All key tiles of a block."""
        plan = self.plan
        stages, _ = plan.layout.stages
        cute.arch.sync_threads()  # nobody reads tiles of the block before any more
        fetch_q(plan, work, scope, place)
        for stage in cutlass.range_constexpr(stages - 1):
            if walk.tiles > stage:
                key = first_key(plan, walk, Int32(stage))
                fetch_keys(plan, work, walk, scope, place.thread, key, Int32(stage))
            cute.arch.cp_async_commit_group()
        stage = Int32(0)
        for step in cutlass.range(walk.tiles, unroll=1):
            cute.arch.cp_async_wait_group(stages - 2)
            cute.arch.sync_threads()
            coming = stage - 1 if stage > 0 else Int32(stages - 1)
            if step + (stages - 1) < walk.tiles:
                key = first_key(plan, walk, step + (stages - 1))
                fetch_keys(plan, work, walk, scope, place.thread, key, coming)
            cute.arch.cp_async_commit_group()
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
        plan = self.plan
        multiply_qk(plan, tile.scores, place, stage)
        for part in cutlass.range_constexpr(len(tile.scores)):
            scores, reference = tile.scores[part], tile.references[part]
            prepare(plan, scope, work, walk, place, scores, reference, Int32(part), step)
            moved, factors = follow_maximum(plan, scope, scores, reference)
            for _ in cutlass.range(once(moved), unroll=1):
                rescale(tile.o[part], factors)
            weigh(plan, scope, scores, tile.p[part], reference)
        multiply_pv(plan, tile.o, tile.p, place, stage)

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
        plan, weighed = self.plan, self.weighed()
        return Tile(
            accumulators(plan, plan.layout.tile_n)[:weighed],
            make_weights(plan),
            accumulators(plan, plan.layout.o_columns),
            tuple(make_reference(plan) for _ in range(weighed)),
        )

    def weighed(self) -> int:
        """Times 16 rows that the warp weighs: all of its team."""
        return self.plan.layout.shape.row_tiles


class SplitMath(Math):
    """Teams of several warps, each with a slice of the head dim. A warp weighs 16 of the team's
    rows, and has O of all of them."""

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
        partial = accumulators(plan, plan.layout.tile_n)
        scores, p = tile.scores[0], tile.p[0]
        multiply_qk(plan, partial, place, stage)
        add_up(plan, partial, scores, place, buffers)
        prepare(plan, scope, work, walk, place, scores, reference, own_tile(plan, place), step)
        moved, factors = follow_maximum(plan, scope, scores, reference)
        weigh(plan, scope, scores, p, reference)
        tell_weights(plan, p, moved, factors, place, buffers)
        meet_team(plan, place)
        take_weights(plan, tile.p, tile.o, place, buffers)
        multiply_pv(plan, tile.o, tile.p, place, stage)

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

    def weighed(self) -> int:
        return 1


@cute.jit
def make_weights(plan: PortablePlan) -> tuple[cute.Tensor, ...]:
    """Registers of P, for each 16 rows of a team."""
    dtype, count = IO_TYPES[plan.config.dtype], plan.layout.tile_n // 2
    return tuple(cute.make_rmem_tensor(count, dtype) for _ in range(plan.layout.shape.row_tiles))


@cute.jit
def begin_rows(reference: Reference) -> None:
    """No key has been seen."""
    reference.row_max.fill(-Float32.inf)
    reference.row_sum.fill(0.0)
    reference.shift.fill(0.0)


@cute.jit
def prepare(
    plan: PortablePlan,
    scope: Scope,
    work: Work,
    walk: Walk,
    place: Place,
    scores: cute.Tensor,
    reference: Reference,
    row_tile: Int32,
    step: Int32,
) -> None:
    """S of 16 rows as it is to be weighed."""
    every = cute.size(scores)
    if cutlass.const_expr(plan.config.softcap):
        softcap(plan, scores, reference, scope.scalars, 0, every)
    for _ in cutlass.range(once(step < walk.masked), unroll=1):
        lane = own_lane(plan, work, scope.scalars, place, row_tile, Int32(0))
        mask(plan, scores, lane, first_key(plan, walk, step), 0, every)


@cute.jit
def follow_maximum(
    plan: PortablePlan, scope: Scope, scores: cute.Tensor, reference: Reference
) -> tuple[Boolean, tuple[Float32, Float32]]:
    """(whether weights of any row of the warp refer to another maximum from now on, by what O of
    the lane's rows is to be multiplied then). It lags while no weight is above 2 ** lag_log2."""
    scale, lag = scope.scalars.scale_log2, plan.config.lag_log2
    tops = largest(scores, reference)
    # (-inf) - (-inf) is NaN, the comparison false: a row that saw no key stays at -inf.
    mine = (tops[0] - reference.row_max[0]) * scale > lag
    mine = mine or (tops[1] - reference.row_max[1]) * scale > lag
    moved = cute.arch.vote_any_sync(mine)
    factors = (Float32(1.0), Float32(1.0))
    if moved:
        factors = refer_to(plan, tops, reference, scope.scalars)
    return moved, factors


@cute.jit
def weigh(
    plan: PortablePlan, scope: Scope, scores: cute.Tensor, p: cute.Tensor, reference: Reference
) -> None:
    """S becomes weights, and P; their sums join those of the rows."""
    exponentiate(plan, scores, reference, scope.scalars, 0, cute.size(scores))
    round_weights(plan, scores, p)
    take_up(reference, tile_sums(plan, scores, p))
