"""Math of a warp that has its query rows alone: S = Q K^T, softmax, O += P V, key tile by key tile,
and the store of O.

The CTA synchronises once for a key tile. The tile is then complete, and all warps are done with the
tile before, whose buffer the next one reuses. Between two barriers warps run independently: the
softmax of one overlaps products of another, in the same CTA or in the other one on the SM.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from fmha.portable.args import Place, Scope, Seen, Tile, Weights
from fmha.portable.epilogue import store_o
from fmha.portable.fetch import fetch_keys, fetch_q
from fmha.portable.plan import PortablePlan
from fmha.portable.products import (
    accumulators,
    hold_q,
    multiply_pv,
    multiply_qk,
    own_lane,
    own_place,
)
from fmha.shared.args import IO_TYPES, Walk, Work
from fmha.shared.epilogue import finish_rows, own_sink
from fmha.shared.two_rows import (
    Reference,
    asked,
    bring_near,
    change,
    exponentiate,
    hide,
    largest,
    make_reference,
    mask,
    over_lanes,
    refer_to,
    rescale,
    round_weights,
    take_up,
    tile_sums,
    tops_of,
)
from fmha.shared.walk import count_rounds, first_key, locate, plan_walk
from kernelkit.device.control import once


@cute.jit
def make_weights(plan: PortablePlan, keys: cutlass.Constexpr) -> tuple[cute.Tensor, ...]:
    """Return registers of P of `keys` keys, for each 16 rows of a team."""
    dtype, row_tiles = IO_TYPES[plan.config.dtype], plan.layout.shape.row_tiles
    return tuple(cute.make_rmem_tensor(keys // 2, dtype) for _ in range(row_tiles))


@cute.jit
def begin_rows(reference: Reference) -> None:
    """Initialise the reference of rows that have seen no key."""
    reference.row_max.fill(-Float32.inf)
    reference.row_sum.fill(0.0)
    reference.shift.fill(0.0)
    reference.limit.fill(0.0)


@cute.jit
def prepare(
    plan: PortablePlan,
    scope: Scope,
    seen: Seen,
    scores: cute.Tensor,
    reference: Reference,
    row_tile: Int32,
) -> None:
    """Apply softcap, functions of positions and mask to S of 16 rows of the team."""
    every, own = cute.size(scores), None
    if cutlass.const_expr(plan.config.moves_all):
        own = own_lane(plan, seen.work, scope, seen.place, row_tile, Int32(0))
    if cutlass.const_expr(plan.config.scales_first):
        change(plan, scores, reference, own, scope, seen.key, 0, every)
    if cutlass.const_expr(plan.config.hides_all):
        hide(plan, scores, reference, own, scope, seen.key, 0, every)
    for _ in cutlass.range(once(seen.masked), unroll=1):
        # Computed here: kept over the loop of key tiles, the row's numbers would cost registers.
        lane = own_lane(plan, seen.work, scope, seen.place, row_tile, Int32(0))
        if cutlass.const_expr(plan.config.hides_blocks):
            hide(plan, scores, reference, lane, scope, seen.key, 0, every)
        mask(plan, scores, reference, lane, seen.key, 0, every)


@cute.jit
def follow_maximum(
    plan: PortablePlan, scope: Scope, tops: tuple[Float32, Float32], reference: Reference
) -> tuple[Boolean, tuple[Float32, Float32]]:
    """Return whether the maximum of any row of the warp moved, and the factors for O of both rows.

    The maximum of a row lags while no weight of the row is above 2 ** lag_log2. tops: the largest
    scores of the lane's rows so far.
    """
    scale, lag = scope.scalars.scale_log2, plan.config.lag_log2
    # (-inf) - (-inf) is NaN, the comparison false: a row that saw no key stays at -inf.
    rows = tuple((tops[half] - reference.row_max[half]) * scale > lag for half in range(2))
    moved = cute.arch.vote_any_sync(rows[0] or rows[1])
    factors = (Float32(1.0), Float32(1.0))
    if moved:
        factors = refer_to(plan, tops_of(reference, tops, rows), reference, scope.scalars)
    return moved, factors


@cute.jit
def weigh(
    plan: PortablePlan,
    scope: Scope,
    scores: cute.Tensor,
    p: cute.Tensor,
    reference: Reference,
    maximum_is_new: cutlass.Constexpr = True,
) -> tuple[Float32, Float32]:
    """Turn S into weights and P; return the lane's sums of the weights.

    maximum_is_new: False if weights of far rows do not matter yet, since they ask for a new
        maximum.
    """
    if cutlass.const_expr(maximum_is_new):
        bring_near(plan, scores, reference, scope.scalars)
    exponentiate(plan, scores, reference, scope.scalars, 0, cute.size(scores))
    round_weights(plan, scores, p)
    return tile_sums(plan, scores, p)


class Math:
    """Whole life of a warp; a subclass defines how it processes the keys of a block."""

    def __init__(self, plan: PortablePlan) -> None:
        self.plan = plan

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Compute block after block."""
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
                cute.arch.sync_threads()  # no warp reads tiles of the previous block any more
                fetch_q(plan, work, scope, place)
                self.sweep(scope, work, walk, place, tile)
            self.finish(scope, work, place, tile)

    @cute.jit
    def fetch(
        self, scope: Scope, work: Work, walk: Walk, place: Place, step: Int32, stage: Int32
    ) -> None:
        """Begin to fetch a key tile, if it exists."""
        fetch_keys(self.plan, work, walk, scope, place.thread, step, stage)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def score(
        self, scope: Scope, seen: Seen, tile: Tile, q: cute.Tensor | None, stage: Int32
    ) -> None:
        """Compute S of the tile in `stage`, with softcap and mask applied."""
        multiply_qk(self.plan, tile.part.scores, q, seen.place, stage)
        self.prepare(scope, seen, tile)

    @cute.jit
    def prepare(self, scope: Scope, seen: Seen, tile: Tile) -> None:
        """Apply softcap and mask to all rows of S."""
        scores = tile.part.scores
        for number in cutlass.range_constexpr(len(scores)):
            reference = tile.references[number]
            prepare(self.plan, scope, seen, scores[number], reference, Int32(number))


class RowMath(Math):
    """Math of a warp that weighs all rows of its team, and has all columns of their O.

    Up to head dim 128 the maximum is stale and recomputed only if weights show that it is too
    small, see `fmha/shared/two_rows.py`; a block's first tile always computes it. Above head dim
    128 products take so long that computing the maximum for each tile costs less than a branch
    between the exponentials and P V, which would serialise them.
    """

    @cute.jit
    def sweep(self, scope: Scope, work: Work, walk: Walk, place: Place, tile: Tile) -> None:
        """Process all key tiles of a block. The next tile is fetched while one is computed."""
        plan = self.plan
        self.fetch(scope, work, walk, place, Int32(0), Int32(0))
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_warp()
        q, stage = hold_q(plan, place), Int32(0)
        for step in cutlass.range(walk.tiles, unroll=1):
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            self.fetch(scope, work, walk, place, step + 1, 1 - stage)
            key = first_key(plan, walk, step)
            seen = Seen(work, place, key, step < walk.masked)
            self.score(scope, seen, tile, q, stage)
            if cutlass.const_expr(plan.layout.asks_weights):
                for _ in cutlass.range(once(step == 0), unroll=1):
                    self.refer(scope, tile, None)
                sums = self.weigh(scope, tile, False)
                for _ in cutlass.range(once(self.too_large(tile, sums)), unroll=1):
                    # The registers of S hold weights by now.
                    self.score(scope, seen, tile, q, stage)
                    self.refer(scope, tile, sums)
                    sums = self.weigh(scope, tile, True)
            else:
                self.follow(scope, tile)
                sums = self.weigh(scope, tile, True)
            for number in cutlass.range_constexpr(len(tile.o)):
                take_up(tile.references[number], sums[number])
            multiply_pv(plan, tile.o, tile.part.p, place, stage, Int32(0))
            stage = 1 - stage

    @cute.jit
    def refer(
        self, scope: Scope, tile: Tile, sums: tuple[tuple[Float32, Float32], ...] | None
    ) -> None:
        """Find new maxima, and make weights, O and sums refer to them.

        sums: sums of the tile's weights, which show which rows need a maximum; None for all rows.
        """
        for number in cutlass.range_constexpr(len(tile.o)):
            reference = tile.references[number]
            tops = largest(self.plan, tile.part.scores[number], reference)
            if cutlass.const_expr(sums is not None):
                tops = tops_of(reference, tops, asked(reference, sums[number]))
            rescale(tile.o[number], refer_to(self.plan, tops, reference, scope.scalars))

    @cute.jit
    def follow(self, scope: Scope, tile: Tile) -> None:
        """Find new maxima where they have grown by too much, and rescale O."""
        for number in cutlass.range_constexpr(len(tile.o)):
            scores, reference = tile.part.scores[number], tile.references[number]
            tops = largest(self.plan, scores, reference)
            moved, factors = follow_maximum(self.plan, scope, tops, reference)
            for _ in cutlass.range(once(moved), unroll=1):
                rescale(tile.o[number], factors)

    @cute.jit
    def weigh(
        self, scope: Scope, tile: Tile, maximum_is_new: cutlass.Constexpr
    ) -> tuple[tuple[Float32, Float32], ...]:
        """Turn S into weights and P; return the sums of each row."""
        part, sums = tile.part, []
        for number in cutlass.range_constexpr(len(tile.o)):
            scores, p, reference = part.scores[number], part.p[number], tile.references[number]
            sums.append(weigh(self.plan, scope, scores, p, reference, maximum_is_new))
        return tuple(sums)

    @cute.jit
    def too_large(self, tile: Tile, sums: tuple[tuple[Float32, Float32], ...]) -> Boolean:
        """Return whether the sums show that a weight of any of the warp's rows may be too large."""
        found = Boolean(False)
        for number in cutlass.range_constexpr(len(sums)):
            limit = tile.references[number].limit
            for half in cutlass.range_constexpr(2):
                found = found or not (sums[number][half] <= limit[half])
        return cute.arch.vote_any_sync(found)

    @cute.jit
    def finish(self, scope: Scope, work: Work, place: Place, tile: Tile) -> None:
        """Store the rows to global memory."""
        plan = self.plan
        for part in cutlass.range_constexpr(len(tile.o)):
            reference = tile.references[part]
            lane = own_lane(plan, work, scope, place, Int32(part), Int32(0))
            sinks = [own_sink(plan, row.head, scope.tensors) for row in lane.rows]
            over_lanes(reference.row_sum)
            factors = finish_rows(plan, work, lane, reference, sinks, scope)
            store_o(plan, work, lane, tile.o[part], factors, scope)

    @cute.jit
    def make_tile(self) -> Tile:
        plan, row_tiles = self.plan, self.plan.layout.shape.row_tiles
        keys = plan.layout.tile_n
        return Tile(
            Weights(accumulators(plan, keys), make_weights(plan, keys)),
            accumulators(plan, plan.layout.o_columns),
            tuple(make_reference(plan) for _ in range(row_tiles)),
        )
