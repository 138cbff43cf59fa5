"""What every warp does where two share the keys of a tile, and the columns of V and O.

Each computes S of all rows of its team and half of the keys, over the whole head dim, and tells the
other its half of P: a warp reads half of K and half of V from shared memory. S of a tile is there
before P V of the one before. Its maxima come to the other warp by the meeting that the next tile
asks for anyway; while P comes, P V of a warp's own keys runs.

The CTA meets once for a tile: what was fetched is there, and all are done with what comes next in
its place. Of two warps of a scheduler one weighs the tile before that, the other one behind it, so
that the softmax of one runs beside the products of the other. Rows are fetched one by one between
the products: sixteen behind each other would keep each warp at its address registers.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from fmha.portable.args import Buffers, Place, Scope, Seen, Tile, Weights
from fmha.portable.epilogue import store_o
from fmha.portable.exchange import fetch_weights, leave_weights, meet_team
from fmha.portable.fetch import coming_rows, fetch_keys
from fmha.portable.layout import ROWS
from fmha.portable.math import Math
from fmha.portable.plan import PortablePlan
from fmha.portable.products import accumulators, multiply_pv, multiply_qk
from fmha.portable.rows import own_lane
from fmha.portable.softmax import follow_maximum, make_weights, weigh
from fmha.shared.args import Walk, Work
from fmha.shared.epilogue import finish_rows
from fmha.shared.statistics import own_sink
from fmha.shared.two_rows import largest, make_reference, over_lanes, rescale, take_up
from fmha.shared.walk import first_key
from kernelkit.device.barriers import arrive, meet
from kernelkit.device.branch import once
from kernelkit.device.shared_words import load, store
from kernelkit.plan import hw

EARLIER = 4 * hw.WARP_THREADS  # the first warp of each of an SM's four schedulers


class KeyMath(Math):
    """A warp has half of the keys of a tile and half of the columns of O, of its team's rows."""

    @cute.jit
    def sweep(self, scope: Scope, work: Work, walk: Walk, place: Place, tile: Tile) -> None:
        """All key tiles of a block. K is fetched one tile ahead of V."""
        plan, stage = self.plan, Int32(0)
        fetch_keys(plan, work, walk, scope, place.thread, Int32(0), stage, of="k")
        cute.arch.cp_async_commit_group()
        fetch_keys(plan, work, walk, scope, place.thread, Int32(1), 1 - stage, of="k")
        fetch_keys(plan, work, walk, scope, place.thread, Int32(0), stage, of="v")
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(1)
        cute.arch.sync_threads()
        multiply_qk(plan, tile.part.scores, None, place, stage)
        self.tell_largest(scope, work, walk, place, tile, Int32(0))
        late = place.thread // EARLIER % 2 != 0
        for step in cutlass.range(walk.tiles, unroll=1):
            self.meet(not late)
            for _ in cutlass.range(once(late), unroll=1):
                meet_team(plan, place)
            self.weigh(scope, place, tile, stage)
            self.meet(late)
            for _ in cutlass.range(once(step + 1 < walk.tiles), unroll=1):
                scores, thread = tile.part.scores, place.thread
                k = coming_rows(plan, work, walk, scope, thread, step + 2, stage, of="k")
                multiply_qk(plan, scores, None, place, 1 - stage, 0, k)
                v = coming_rows(plan, work, walk, scope, thread, step + 1, 1 - stage, of="v")
                multiply_qk(plan, scores, None, place, 1 - stage, 1, v)
                cute.arch.cp_async_commit_group()
                self.tell_largest(scope, work, walk, place, tile, step + 1)
            self.multiply(scope, place, tile, stage)
            stage = 1 - stage

    @cute.jit
    def meet(self, now: Boolean) -> None:
        """The CTA, if it is this warp's time."""
        for _ in cutlass.range(once(now), unroll=1):
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()

    @cute.jit
    def tell_largest(
        self, scope: Scope, work: Work, walk: Walk, place: Place, tile: Tile, step: Int32
    ) -> None:
        """S as it is to be weighed, and its maxima to the other warp."""
        plan = self.plan
        key = first_key(plan, walk, step) + place.slice * plan.layout.shape.score_keys
        self.prepare(scope, Seen(work, place, key, step < walk.masked), tile)
        for number in cutlass.range_constexpr(len(tile.references)):
            tops = largest(plan, tile.part.scores[number], tile.references[number])
            tell_rows(plan, tops, place, scope.buffers, number, step % 2)

    @cute.jit
    def weigh(self, scope: Scope, place: Place, tile: Tile, stage: Int32) -> None:
        """S becomes weights, and P, which the other warp gets, too; O as the maxima ask for it."""
        plan, part, buffers = self.plan, tile.part, scope.buffers
        for number in cutlass.range_constexpr(len(tile.references)):
            reference = tile.references[number]
            one = told_rows(plan, place.slice, place, buffers, number, stage)
            other = told_rows(plan, 1 - place.slice, place, buffers, number, stage)
            tops = tuple(cute.arch.fmax(one[half], other[half]) for half in range(2))
            moved, factors = follow_maximum(plan, scope, tops, reference)
            for _ in cutlass.range(once(moved), unroll=1):
                rescale(tile.o[number], factors)
            take_up(reference, weigh(plan, scope, part.scores[number], part.p[number], reference))
            first = weights_of(plan, place.slice, buffers, number)
            leave_weights(plan, part.p[number], place, first)
        arrive(plan.barriers, "ready", 2 * place.team, place.slice)

    @cute.jit
    def multiply(self, scope: Scope, place: Place, tile: Tile, stage: Int32) -> None:
        """O += P V: of the warp's own keys first, then of the other's."""
        plan, p, other = self.plan, tile.part.p, 1 - place.slice
        keys = plan.layout.shape.score_keys
        multiply_pv(plan, tile.o, p, place, stage, place.slice * keys)
        meet(plan.barriers, "ready", 2 * place.team, other)
        for number in cutlass.range_constexpr(len(p)):
            first = weights_of(plan, other, scope.buffers, number)
            fetch_weights(plan, p[number], place, first)
        multiply_pv(plan, tile.o, p, place, stage, other * keys)

    @cute.jit
    def finish(self, scope: Scope, work: Work, place: Place, tile: Tile) -> None:
        """What the rows leave, to global memory: each warp its columns, one of them statistics."""
        plan, buffers = self.plan, scope.buffers
        meet_team(plan, place)  # nobody reads what was told of the block before any more
        for number in cutlass.range_constexpr(len(tile.references)):
            row_sum = tile.references[number].row_sum
            over_lanes(row_sum)
            tell_rows(plan, (row_sum[0], row_sum[1]), place, buffers, number, Int32(0))
        meet_team(plan, place)
        for number in cutlass.range_constexpr(len(tile.references)):
            reference = tile.references[number]
            # Both warps add in the same order.
            one = told_rows(plan, Int32(0), place, buffers, number, Int32(0))
            other = told_rows(plan, Int32(1), place, buffers, number, Int32(0))
            for half in cutlass.range_constexpr(2):
                reference.row_sum[half] = one[half] + other[half]
            lane = own_lane(plan, work, scope.scalars, place, Int32(number), place.slice)
            sinks = [own_sink(plan, row.head, scope.tensors) for row in lane.rows]
            factors = finish_rows(plan, work, lane, reference, sinks, scope)
            store_o(plan, work, lane, tile.o[number], factors, scope)

    @cute.jit
    def make_tile(self) -> Tile:
        plan, keys = self.plan, self.plan.layout.shape.score_keys
        return Tile(
            Weights(accumulators(plan, keys), make_weights(plan, keys)),
            accumulators(plan, plan.layout.o_columns),
            tuple(make_reference(plan) for _ in range(plan.layout.shape.row_tiles)),
        )


@cute.jit
def weights_of(
    plan: PortablePlan, warp: Int32, buffers: Buffers, row_tile: cutlass.Constexpr
) -> Int32:
    """Where P of 16 rows and a warp's keys begins."""
    layout = plan.layout
    rows = buffers.p + row_tile * (ROWS * layout.sized.p_row_bytes)
    return rows + warp * (layout.shape.score_keys * plan.config.q_item_bytes)


@cute.jit
def tell_rows(
    plan: PortablePlan,
    numbers: tuple[Float32, Float32],
    place: Place,
    buffers: Buffers,
    row_tile: cutlass.Constexpr,
    stage: Int32,
) -> None:
    """A number of each of the lane's two rows, to the other warp."""
    start = _told(plan, place.slice, place, buffers, row_tile, stage)
    if place.lane % 4 == 0:
        store(start, Float32, numbers[:1])
        store(start + 8 * 4, Float32, numbers[1:])


@cute.jit
def told_rows(
    plan: PortablePlan,
    warp: Int32,
    place: Place,
    buffers: Buffers,
    row_tile: cutlass.Constexpr,
    stage: Int32,
) -> tuple[Float32, Float32]:
    """What a warp told of them."""
    start = _told(plan, warp, place, buffers, row_tile, stage)
    return load(start, Float32), load(start + 8 * 4, Float32)


@cute.jit
def _told(
    plan: PortablePlan,
    warp: Int32,
    place: Place,
    buffers: Buffers,
    row_tile: cutlass.Constexpr,
    stage: Int32,
) -> Int32:
    sized, rows = plan.layout.sized, plan.layout.rows
    start = buffers.sums + stage * sized.tops_bytes + warp * (rows * 4)
    return start + (row_tile * ROWS + place.lane // 4) * 4
