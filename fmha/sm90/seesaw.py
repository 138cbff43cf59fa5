"""Math role if two warpgroups share a query tile: they process its key tiles alternately.

A warpgroup computes S and the weights of its key tiles alone. Their P stays in registers for the
product with its columns of V, and goes through shared memory for the other warpgroup's. The two are
half a round apart: while one exponentiates, the other's products run.

Weights refer to a maximum that is published with P. The warpgroup that finds a maximum too small
raises it and continues; the other raises its maximum when it reads that P. So both process the
tiles in one order, and they wait for nothing but P.

Warpgroups publish P of their key tiles with its maxima, and at the end the sums of their weights.
The same thread has the same two rows in all of them.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp, warpgroup
from cutlass.pipeline import PipelineState

from fmha.shared.args import Lane, Scope, Walk
from fmha.shared.epilogue import finish_rows, own_sink
from fmha.shared.two_rows import (
    Reference,
    asked,
    begin_row,
    bring_near,
    exponentiate,
    largest,
    make_reference,
    over_lanes,
    refer_to,
    rescale,
    round_weights,
    take_up,
    tile_sums,
    too_large,
    tops_of,
)
from fmha.shared.walk import count_rounds, locate, plan_walk
from fmha.sm90.epilogue import store_o
from fmha.sm90.math import Math
from fmha.sm90.plan import Plan90
from fmha.sm90.products import (
    accumulator,
    issue,
    issue_pv,
    k_operand,
    make_pv_mma,
    make_qk_mma,
    own_lane,
    p_registers,
    q_operand,
    shared_p,
    shared_p_operand,
    v_operand,
)
from kernelkit.device.barriers import meet
from kernelkit.device.pipelines import consumer_state, consumer_state_at, producer_state_at
from kernelkit.plan import hw

MAXIMUM, SUM = 0, 1  # index of a number of a row


@cute.jit
def share_p(plan: Plan90, lane: Lane, p: cute.Tensor, buffer: cute.Pointer) -> None:
    """Store P of this warpgroup's key tile, in registers like S, to its buffer in shared memory."""
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), p.element_type)
    copy = cute.make_tiled_copy_C(atom, make_qk_mma(plan))
    thread, _, _ = cute.arch.thread_idx()
    part = copy.get_slice(thread % plan.roles["math"].team_threads)
    own = shared_p(plan, buffer)[None, None, lane.part]
    cute.copy(copy, part.retile(p), part.partition_D(own))
    cute.arch.fence_proxy("async.shared", space="cta")


@cute.jit
def publish(
    plan: Plan90,
    lane: Lane,
    buffer: cute.Pointer,
    kind: cutlass.Constexpr,
    own: tuple[Float32, Float32],
) -> None:
    """Publish one number for each of two rows."""
    numbers = published(plan, buffer, kind)
    for half in cutlass.range_constexpr(2):
        if lane.column == 0:
            numbers[lane.first_row + 8 * half, lane.part] = own[half]


@cute.jit
def read_published(
    plan: Plan90, lane: Lane, buffer: cute.Pointer, kind: cutlass.Constexpr, part: Int32
) -> tuple[Float32, Float32]:
    """Return the numbers that warpgroup `part` of the query tile published for the two rows."""
    numbers = published(plan, buffer, kind)
    return numbers[lane.first_row, part], numbers[lane.first_row + 8, part]


@cute.jit
def published(plan: Plan90, buffer: cute.Pointer, kind: cutlass.Constexpr) -> cute.Tensor:
    """Return the numbers of one kind, (row, warpgroup)."""
    shape = (plan.layout.rows, plan.layout.sharers)
    return cute.make_tensor(buffer + kind * cute.size(shape), cute.make_layout(shape))


@cute.jit
def sums_of_all(
    plan: Plan90, lane: Lane, buffer: cute.Pointer, own: tuple[Float32, Float32]
) -> tuple[Float32, Float32]:
    """Return the sums of two rows over all warpgroups of the tile, which synchronise here."""
    publish(plan, lane, buffer, SUM, own)
    meet(plan.barriers, "sums")
    first, second = read_published(plan, lane, buffer, SUM, 0)
    for part in cutlass.range_constexpr(1, plan.layout.sharers):
        others = read_published(plan, lane, buffer, SUM, part)
        first, second = first + others[0], second + others[1]
    return first, second


@dataclass(frozen=True)
class Tile:
    """Operands of a warpgroup, and a thread's registers for them."""

    scores: cute.Tensor  # fp32
    p: cute.Tensor  # weights of its own tile, rounded, as the A operand
    o: cute.Tensor  # fp32: its columns
    reference: Reference
    q: cute.Tensor  # as the A operand, (MMA, 1, k_columns / 16, piece)
    k: cute.Tensor  # pieces in the K ring as the B operand, (MMA, 1, k_columns / 16, stage)
    v: cute.Tensor  # pieces in the V ring as the B operand, (MMA, 1, tile_n / 16, stage)
    every_p: cute.Tensor  # in shared memory as the A operand, (MMA, 1, tile_n / 16, warpgroup)


@dataclass(frozen=True)
class Block:
    """Query block that a warpgroup computes at a time."""

    scope: Scope
    walk: Walk
    lane: Lane
    tile: Tile
    tiles: Int32  # key tiles of the blocks before
    weighed: Int32  # those of them that were its own


class Seesaw(Math):
    """Math of two warpgroups that share a query tile; each is traced separately."""

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warps."""
        team = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // hw.WARPGROUP_WARPS
        for part in cutlass.range_constexpr(self.role.teams):
            if team == part:
                self.run_team(scope, part)

    @cute.jit
    def run_team(self, scope: Scope, team: cutlass.Constexpr) -> None:
        """Whole life of warpgroup `team`."""
        plan, pipes = self.plan, scope.pipes
        tile = self.make_shared_tile(scope, team)
        self.open_turns(Int32(team))
        reference, o = tile.reference, tile.o
        q_state, tiles, weighed = consumer_state(1), Int32(0), Int32(0)
        for turn in cutlass.range(count_rounds(plan, scope.tensors.order), unroll=1):
            work = locate(plan, scope.tensors, turn)
            walk = plan_walk(plan, work, scope.scalars)
            lane = own_lane(plan, work, scope, Int32(team))
            sinks = [own_sink(plan, row.head, scope.tensors) for row in lane.rows]
            begin_row(plan, reference, lane, work, scope)
            refer_to(plan, (-Float32.inf, -Float32.inf), reference, scope.scalars)
            o.fill(0.0)
            if walk.tiles > 0:
                block = Block(scope, walk, lane, tile, tiles, weighed)
                if cutlass.const_expr(plan.config.ragged_keys):
                    self.clear_tail_rows(scope, walk, self.own_v(block, Int32(0), team))
                pipes.q.wait(q_state)
                self.take_tiles(block, team)
                q_state.advance()
                over_lanes(reference.row_sum)
                own = (reference.row_sum[0], reference.row_sum[1])
                every = sums_of_all(plan, lane, scope.buffers.statistics, own)
                reference.row_sum[0], reference.row_sum[1] = every
                # Only now: the sums of the next block use the same memory.
                pipes.q.release(0)
                weighed += (walk.tiles + 1 - team) // 2
                tiles += walk.tiles
            factors = finish_rows(plan, work, lane, reference, sinks, scope)
            store_o(plan, work, lane, o, factors, scope)
        self.close_turns(Int32(team))
        # Keep shared memory until the last copy has read it; a thread without copies does not wait.
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def make_shared_tile(self, scope: Scope, team: cutlass.Constexpr) -> Tile:
        """Make the operands and registers of warpgroup `team`."""
        plan, layout, buffers = self.plan, self.plan.layout, scope.buffers
        qk, pv = make_qk_mma(plan), make_pv_mma(plan)
        return Tile(
            accumulator(qk, layout.rows, layout.tile_n),
            p_registers(plan),
            accumulator(pv, layout.rows, layout.o_columns),
            make_reference(plan),
            q_operand(plan, qk, buffers.q),
            k_operand(plan, qk, buffers.k),
            v_operand(plan, pv, buffers.v, Int32(0)),
            shared_p_operand(plan, buffers.p),
        )

    @cute.jit
    def take_tiles(self, block: Block, team: cutlass.Constexpr) -> None:
        """Process all tiles of the block; every second tile is this warpgroup's."""
        tiles = block.walk.tiles
        if cutlass.const_expr(team == 0):
            self.take_own(block, Int32(0), team, False)
        for step in cutlass.range(2 - team, tiles, 2, unroll=1):
            self.take_own(block, step, team, True)
        if (tiles - 1) % 2 == 1 - team:
            if cutlass.const_expr(team > 0):
                self.wait_turn(Int32(team))
                self.pass_turn(Int32(team))
            self.issue_other(block, tiles - 1, team)
            warpgroup.wait_group(0)
            self.release_other(block, tiles - 1, team)

    @cute.jit
    def take_own(
        self,
        block: Block,
        step: Int32,
        team: cutlass.Constexpr,
        behind: cutlass.Constexpr,
    ) -> None:
        """Process the warpgroup's tile of `step`; if `behind`, also the other's tile before it.

        If V is K, the first warpgroup's K needs the buffer of V of the previous tile. By then the
        second warpgroup's K has arrived, and the first one's weights have not been computed.
        """
        tile, o = block.tile, block.tile.o
        first = self.plan.config.k_is_v and team == 0
        if cutlass.const_expr(behind and first):
            self.issue_other(block, step - 1, team)
            warpgroup.wait_group(0)
            self.release_other(block, step - 1, team)
        self.issue_scores(block, step, team)
        if cutlass.const_expr(behind and not first):
            self.issue_other(block, step - 1, team)
            warpgroup.wait_group(1)
        else:
            warpgroup.wait_group(0)
        self.release_k(block, step, self.plan.layout.k_pieces - 1)
        factors = self.weigh_own(block, step)
        self.share(block, step, team)
        # The branch in `share` keeps ptxas from moving the wait up.
        warpgroup.wait_group(0)
        if cutlass.const_expr(behind and not first):
            self.release_other(block, step - 1, team)
        if cute.arch.vote_any_sync(factors[0] != 1.0 or factors[1] != 1.0):
            rescale(o, factors)
        v_state = self.own_v(block, step, team)
        block.scope.pipes.v.wait(v_state)
        issue_pv(self.plan, o, tile.p, tile.v[None, None, None, v_state.index])
        warpgroup.wait_group(0)
        block.scope.pipes.v.release(v_state.index)

    @cute.jit
    def issue_scores(self, block: Block, step: Int32, team: cutlass.Constexpr) -> None:
        """Issue S of the tile piece by piece as they arrive, once the other has passed the tile
        before.

        A barrier's phase distinguishes a filling only from the one before it.
        """
        plan, tile, pipes = self.plan, block.tile, block.scope.pipes
        self.wait_turn(Int32(team))
        for piece in cutlass.range_constexpr(plan.layout.k_pieces):
            state = self.k_state(block, step, piece)
            pipes.k.wait(state)
            q = tile.q[None, None, None, piece]
            k = tile.k[None, None, None, state.index]
            issue(make_qk_mma(plan), tile.scores, (q,), k, piece > 0)
            if cutlass.const_expr(piece == plan.layout.k_pieces - 1):
                self.pass_turn(Int32(team))
            if cutlass.const_expr(piece > 0 and not plan.config.k_is_v):
                warpgroup.wait_group(1)
                self.release_k(block, step, piece - 1)

    @cute.jit
    def release_k(self, block: Block, step: Int32, piece: cutlass.Constexpr) -> None:
        """Release a piece of K after its S. If V is K the piece is released as V."""
        if cutlass.const_expr(not self.plan.config.k_is_v):
            block.scope.pipes.k.release(self.k_state(block, step, piece).index)

    @cute.jit
    def issue_other(self, block: Block, step: Int32, team: cutlass.Constexpr) -> None:
        """Wait for P of the other's tile of `step`, and issue its P V."""
        plan, scope, tile = self.plan, block.scope, block.tile
        scope.pipes.p.wait(self.other_p(block, step), 1 - team)
        tops = read_published(plan, block.lane, scope.buffers.statistics, MAXIMUM, 1 - team)
        row_max = tile.reference.row_max
        if cute.arch.vote_any_sync(tops[0] != row_max[0] or tops[1] != row_max[1]):
            rescale(tile.o, refer_to(plan, tops, tile.reference, scope.scalars))
        v_state = self.own_v(block, step, team)
        scope.pipes.v.wait(v_state)
        p = tile.every_p[None, None, None, 1 - team]
        issue_pv(plan, tile.o, p, tile.v[None, None, None, v_state.index], True)

    @cute.jit
    def release_other(self, block: Block, step: Int32, team: cutlass.Constexpr) -> None:
        """Release V and the other warpgroup's P once our P V has read them."""
        block.scope.pipes.v.release(self.own_v(block, step, team).index)
        block.scope.pipes.p.release(1 - team)

    @cute.jit
    def weigh_own(self, block: Block, step: Int32) -> tuple[Float32, Float32]:
        """Weigh the tile of `step`, whose S is complete.

        Return the factors of both rows of O, to apply before the product is added.
        """
        plan, tile, lane, scope = self.plan, block.tile, block.lane, block.scope
        self.prepare(scope, lane, block.walk, step, tile, 0, cute.size(tile.scores))
        sums = self.weights(tile, scope, False)
        factors = (Float32(1.0), Float32(1.0))
        if cute.arch.vote_any_sync(too_large(lane, tile.reference, sums)):
            rows = asked(tile.reference, sums)
            tops = tops_of(tile.reference, largest(plan, tile.scores, tile.reference), rows)
            factors = refer_to(plan, tops, tile.reference, scope.scalars)
            sums = self.weights(tile, scope, True)
        take_up(tile.reference, sums)
        return factors

    @cute.jit
    def weights(
        self, tile: Tile, scope: Scope, maximum_is_new: cutlass.Constexpr
    ) -> tuple[Float32, Float32]:
        """Compute P from S, which stays; return the sums of the weights."""
        weights = cute.make_rmem_tensor(tile.scores.shape, Float32)
        weights.store(tile.scores.load())
        if cutlass.const_expr(maximum_is_new):
            bring_near(self.plan, weights, tile.reference, scope.scalars)
        exponentiate(self.plan, weights, tile.reference, scope.scalars, 0, cute.size(weights))
        round_weights(self.plan, weights, tile.p)
        return tile_sums(self.plan, weights, tile.p)

    @cute.jit
    def share(self, block: Block, step: Int32, team: cutlass.Constexpr) -> None:
        """Publish P and its maxima to the other warpgroup."""
        plan, tile, scope = self.plan, block.tile, block.scope
        filling = block.weighed + step // 2
        scope.pipes.p.wait_free(producer_state_at(1, filling), team)
        p = cute.make_tensor(tile.p.iterator, tile.scores.layout)
        share_p(plan, block.lane, p, scope.buffers.p)
        row_max = tile.reference.row_max
        own = (row_max[0], row_max[1])
        publish(plan, block.lane, scope.buffers.statistics, MAXIMUM, own)
        cute.arch.sync_warp()
        scope.pipes.p.signal(team)

    def other_p(self, block: Block, step: Int32) -> PipelineState:
        """Return the state of the other warpgroup's P of `step`."""
        return consumer_state_at(1, block.tiles - block.weighed + step // 2)

    def k_state(self, block: Block, step: Int32, piece: int) -> PipelineState:
        """Return the state of a piece of K of `step`."""
        layout = self.plan.layout
        return consumer_state_at(layout.stages[0], (block.tiles + step) * layout.k_pieces + piece)

    def own_v(self, block: Block, step: Int32, team: int) -> PipelineState:
        """Return the state of the piece of V of `step` with this warpgroup's columns."""
        layout = self.plan.layout
        return consumer_state_at(layout.stages[1], (block.tiles + step) * layout.v_pieces + team)
