"""Math of a warp in a team of several (device code).

`SliceMath`: each warp has a slice of the head dim and computes Q K^T over it. The team adds these
sums, a warp weighs 16 of the team's rows, and each warp adds P V of all rows to its slice of O.
Sums are exchanged in lane order, 16 bytes for each lane: all warps have the same elements in the
same lane. If a team has more warps than tiles of 16 rows, several warps weigh the same rows, from
the same sums in the same order, and one of them writes P. P lies in rows, for ldmatrix. The CTA
synchronises once for a key tile: the tile is then complete, and all warps are done with the tile
before, whose buffer the next one reuses.

`KeyMath`: two warps share the keys of a tile, and the columns of V and O. Each computes S of all
rows of its team and half of the keys, over the whole head dim, and passes its half of P to the
other. So a warp reads half of K and half of V from shared memory. S of a tile is computed before
P V of the tile before. The barrier that the next tile needs anyway also publishes its maxima.
While the other's P arrives, P V of the warp's own keys runs. The CTA synchronises once for a tile,
as above. Of two warps of a scheduler one weighs before that barrier, the other after it, so that
the softmax of one overlaps the products of the other. Row fetches are interleaved with the
products: sixteen in sequence would stall each warp on its address registers.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from fmha.portable.args import Buffers, Place, Scope, Seen, Tile, Weights
from fmha.portable.epilogue import store_o
from fmha.portable.fetch import coming_rows, fetch_keys
from fmha.portable.layout import ROWS
from fmha.portable.math import Math, follow_maximum, make_weights, prepare, weigh
from fmha.portable.plan import PortablePlan
from fmha.portable.products import accumulators, multiply_pv, multiply_qk, own_lane
from fmha.shared.args import Walk, Work
from fmha.shared.epilogue import finish_rows, own_sink
from fmha.shared.two_rows import largest, make_reference, over_lanes, rescale, take_up
from fmha.shared.walk import first_key
from kernelkit.device.barriers import arrive, meet
from kernelkit.device.control import once
from kernelkit.device.shared_words import load, store
from kernelkit.device.warp_mma import CHUNK_BYTES, load_fragment
from kernelkit.plan import hw


@cute.jit
def meet_team(plan: PortablePlan, place: Place) -> None:
    """Synchronise all warps of the team."""
    meet(plan.barriers, "team", place.team)


@cute.jit
def own_tile(plan: PortablePlan, place: Place) -> Int32:
    """Return which 16 rows of the team the warp weighs."""
    return place.slice % plan.layout.shape.row_tiles


@cute.jit
def add_up(
    plan: PortablePlan,
    partial: tuple[cute.Tensor, ...],
    own: cute.Tensor,
    place: Place,
    buffers: Buffers,
) -> None:
    """Set `own` to the sum of all warps' `partial` over the warp's rows."""
    if cutlass.const_expr(plan.layout.sized.trades):
        _swap(plan, partial, own, place, buffers)
        return
    for part in cutlass.range_constexpr(len(partial)):
        _leave(plan, partial[part], place, buffers, place.slice * len(partial) + part)
    meet_team(plan, place)
    row_tile = own_tile(plan, place)
    own.fill(0.0)
    for warp in cutlass.range_constexpr(plan.layout.shape.slices):
        _add(plan, own, place, buffers, row_tile + warp * len(partial))


@cute.jit
def _swap(
    plan: PortablePlan,
    partial: tuple[cute.Tensor, ...],
    own: cute.Tensor,
    place: Place,
    buffers: Buffers,
) -> None:
    """Exchange sums between two warps that weigh 16 rows each: each needs half of the
    other's sums.
    """
    first = Boolean(place.slice == 0)
    sent = cute.make_rmem_tensor_like(own)
    for number in cutlass.range_constexpr(cute.size(own)):
        one, other = partial[0][number], partial[1][number]
        own[number] = one if first else other
        sent[number] = other if first else one
    _leave(plan, sent, place, buffers, place.slice)
    meet_team(plan, place)
    _add(plan, own, place, buffers, 1 - place.slice)


@cute.jit
def _leave(
    plan: PortablePlan, sums: cute.Tensor, place: Place, buffers: Buffers, slot: Int32
) -> None:
    start = _slot(plan, place, buffers, slot)
    for group in cutlass.range_constexpr(cute.size(sums) // 4):
        four = tuple(sums[4 * group + number] for number in range(4))
        store(start + group * (hw.WARP_THREADS * CHUNK_BYTES), Float32, four)


@cute.jit
def _add(plan: PortablePlan, own: cute.Tensor, place: Place, buffers: Buffers, slot: Int32) -> None:
    start = _slot(plan, place, buffers, slot)
    for group in cutlass.range_constexpr(cute.size(own) // 4):
        four = load(start + group * (hw.WARP_THREADS * CHUNK_BYTES), Float32, 4)
        for number in cutlass.range_constexpr(4):
            own[4 * group + number] = own[4 * group + number] + four[number]


@cute.jit
def _slot(plan: PortablePlan, place: Place, buffers: Buffers, slot: Int32) -> Int32:
    """Return the address of the lane's part of 16 rows of sums."""
    return buffers.sums + slot * (ROWS * plan.layout.tile_n * 4) + place.lane * CHUNK_BYTES


@cute.jit
def tell_weights(
    plan: PortablePlan,
    p: cute.Tensor,
    moved: Boolean,
    factors: tuple[Float32, Float32],
    place: Place,
    buffers: Buffers,
) -> None:
    """Publish P of the warp's rows, and the factors of their O if any is not 1."""
    row_tile = own_tile(plan, place)
    if place.slice < plan.layout.shape.row_tiles:
        leave_weights(plan, p, place, buffers.p + row_tile * (ROWS * plan.layout.sized.p_row_bytes))
        if place.lane == 0:
            store(buffers.moved + row_tile * 4, Int32, (Int32(moved),))
        for _ in cutlass.range(once(moved), unroll=1):
            tell_factors(plan, factors, place, buffers)


@cute.jit
def leave_weights(plan: PortablePlan, p: cute.Tensor, place: Place, first: Int32) -> None:
    """Store P of 16 rows, as rows from `first` on."""
    row_bytes, words = plan.layout.sized.p_row_bytes, cute.recast_tensor(p, Uint32)
    start = first + place.lane // 4 * row_bytes + place.lane % 4 * 4
    for number in cutlass.range_constexpr(cute.size(words)):
        offset = number % 2 * 8 * row_bytes + number // 2 * CHUNK_BYTES
        store(start + offset, Uint32, (words[number],))


@cute.jit
def fetch_weights(plan: PortablePlan, p: cute.Tensor, place: Place, first: Int32) -> None:
    """Load P of 16 rows as A operands."""
    row_bytes, words = plan.layout.sized.p_row_bytes, cute.recast_tensor(p, Uint32)
    start = first + place.lane % ROWS * row_bytes + place.lane // ROWS * CHUNK_BYTES
    for step in cutlass.range_constexpr(cute.size(words) // 4):
        four = load_fragment(start + step * 2 * CHUNK_BYTES, False)
        for number in cutlass.range_constexpr(4):
            words[4 * step + number] = four[number]


@cute.jit
def tell_factors(
    plan: PortablePlan, factors: tuple[Float32, Float32], place: Place, buffers: Buffers
) -> None:
    """Publish the factors of the warp's rows to all warps of the team."""
    start = buffers.factors + (own_tile(plan, place) * ROWS + place.lane // 4) * 4
    if place.slice < plan.layout.shape.row_tiles and place.lane % 4 == 0:
        store(start, Float32, factors[:1])
        store(start + 8 * 4, Float32, factors[1:])


@cute.jit
def told_factors(
    place: Place, buffers: Buffers, row_tile: cutlass.Constexpr
) -> tuple[Float32, Float32]:
    """Return the published factors of the lane's two rows of 16."""
    start = buffers.factors + (row_tile * ROWS + place.lane // 4) * 4
    return load(start, Float32), load(start + 8 * 4, Float32)


@cute.jit
def take_weights(
    plan: PortablePlan,
    p: tuple[cute.Tensor, ...],
    o: tuple[cute.Tensor, ...],
    place: Place,
    buffers: Buffers,
) -> None:
    """Load P of all rows of the team as A operands, and rescale O if a maximum moved."""
    for part in cutlass.range_constexpr(len(p)):
        first = buffers.p + part * (ROWS * plan.layout.sized.p_row_bytes)
        fetch_weights(plan, p[part], place, first)
        moved = load(buffers.moved + part * 4, Int32)
        for _ in cutlass.range(once(moved != 0), unroll=1):
            rescale(o[part], told_factors(place, buffers, part))


class SliceMath(Math):
    """Math of a warp that weighs 16 of the team's rows and has a slice of the columns
    of all of O.
    """

    @cute.jit
    def sweep(self, scope: Scope, work: Work, walk: Walk, place: Place, tile: Tile) -> None:
        """Process all key tiles of a block."""
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
        """Process one key tile."""
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
        """Store the rows to global memory; the warps that weighed rows store their statistics."""
        plan, buffers, reference = self.plan, scope.buffers, tile.references[0]
        row_tile, row_tiles = own_tile(plan, place), plan.layout.shape.row_tiles
        own = own_lane(plan, work, scope, place, row_tile, place.slice // row_tiles)
        sinks = [own_sink(plan, row.head, scope.tensors) for row in own.rows]
        over_lanes(reference.row_sum)
        factors = finish_rows(plan, work, own, reference, sinks, scope)
        meet_team(plan, place)  # no warp reads factors of the previous block any more
        tell_factors(plan, factors, place, buffers)
        meet_team(plan, place)
        for part in cutlass.range_constexpr(len(tile.o)):
            lane = own_lane(plan, work, scope, place, Int32(part), place.slice)
            store_o(plan, work, lane, tile.o[part], told_factors(place, buffers, part), scope)

    @cute.jit
    def make_tile(self) -> Tile:
        plan, keys = self.plan, self.plan.layout.tile_n
        whole = Weights(accumulators(plan, keys)[:1], make_weights(plan, keys))
        o = accumulators(plan, plan.layout.o_columns)
        return Tile(whole, o, (make_reference(plan),))


EARLIER = 4 * hw.WARP_THREADS  # the first warp of each of an SM's four schedulers


class KeyMath(Math):
    """Math of a warp that has half of the keys of a tile and half of the columns of O of its team's
    rows.
    """

    @cute.jit
    def sweep(self, scope: Scope, work: Work, walk: Walk, place: Place, tile: Tile) -> None:
        """Process all key tiles of a block. K is fetched one tile ahead of V."""
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
        """Synchronise the CTA if `now`."""
        for _ in cutlass.range(once(now), unroll=1):
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()

    @cute.jit
    def tell_largest(
        self, scope: Scope, work: Work, walk: Walk, place: Place, tile: Tile, step: Int32
    ) -> None:
        """Prepare S for weighing, and publish its maxima to the other warp."""
        plan = self.plan
        key = first_key(plan, walk, step) + place.slice * plan.layout.shape.score_keys
        self.prepare(scope, Seen(work, place, key, step < walk.masked), tile)
        for number in cutlass.range_constexpr(len(tile.references)):
            tops = largest(plan, tile.part.scores[number], tile.references[number])
            tell_rows(plan, tops, place, scope.buffers, number, step % 2)

    @cute.jit
    def weigh(self, scope: Scope, place: Place, tile: Tile, stage: Int32) -> None:
        """Turn S into weights and P, publish P to the other warp, and rescale O if a
        maximum moved.
        """
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
        """Add P V to O: of the warp's keys first, then of the other's."""
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
        """Store the rows to global memory: each warp its columns, one of them the statistics."""
        plan, buffers = self.plan, scope.buffers
        meet_team(plan, place)  # no warp reads published numbers of the previous block any more
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
            lane = own_lane(plan, work, scope, place, Int32(number), place.slice)
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
    """Return the address of P of 16 rows and a warp's keys."""
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
    """Publish a number of each of the lane's two rows to the other warp."""
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
    """Return the numbers that warp `warp` published for the lane's two rows."""
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
