"""Math role: each warpgroup computes its query tile from S to O.

The products of a step overlap the softmax: S of a tile and P V of the previous one are issued
together; while S is exponentiated, P V still runs. In ping-pong order the warpgroups issue one
after the other, so that the softmax of one overlaps the products of the others. In e4m3 the loop
differs, see `fp8.py`.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import warpgroup
from cutlass.pipeline import PipelineState

from fmha.shared.args import IO_TYPES, Lane, Scope, Walk
from fmha.shared.epilogue import finish_rows, own_sink
from fmha.shared.two_rows import (
    PIECE,
    Reference,
    asked,
    begin_row,
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
    too_large,
    tops_of,
)
from fmha.shared.walk import count_rounds, first_key, hidden_steps, locate, plan_walk
from fmha.sm90.epilogue import store_o
from fmha.sm90.layout import VT_STAGES
from fmha.sm90.plan import Plan90
from fmha.sm90.products import (
    accumulator,
    issue_pv,
    issue_qk,
    k_operand,
    make_products,
    make_pv_mma,
    make_qk_mma,
    own_lane,
    p_registers,
    q_operand,
    v_operand,
)
from kernelkit.device.barriers import any_of, arrive, meet
from kernelkit.device.pipelines import consumer_state
from kernelkit.plan import hw


@dataclass(frozen=True)
class Tile:
    """Operands of a warpgroup, and a thread's registers for them."""

    scores: cute.Tensor  # fp32: S, then its weights
    p: cute.Tensor  # weights, rounded, as the A operand
    o: cute.Tensor  # fp32
    products: tuple[cute.Tensor, ...]  # fp32, in e4m3: P V of some columns, to be added to O
    reference: Reference
    q: tuple[cute.Tensor, ...]  # terms as the A operand, (MMA, 1, head_dim / 16), the smaller first
    k: cute.Tensor  # the K ring as the B operand, (MMA, 1, head_dim / 16, stage)
    v: tuple[cute.Tensor, ...]  # the V ring as the B operand, part by part of O


class Math:
    """Role that computes S = Q K^T, softmax and O += P V, and stores O."""

    def __init__(self, plan: Plan90) -> None:
        self.plan = plan
        self.role = plan.roles["math"]

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warps."""
        plan, layout, pipes = self.plan, self.plan.layout, scope.pipes
        team = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // hw.WARPGROUP_WARPS
        tile = self.make_tile(scope, team)
        reference, o = tile.reference, tile.o
        values, v_stages = pipes.v, layout.stages[1]
        if cutlass.const_expr(plan.config.is_fp8):
            values, v_stages = pipes.vt, VT_STAGES
        k_state, v_state = consumer_state(layout.stages[0]), consumer_state(v_stages)
        q_state = consumer_state(1)
        self.open_turns(team)
        for turn in cutlass.range(count_rounds(plan, scope.tensors.order), unroll=1):
            work = locate(plan, scope.tensors, turn)
            walk = plan_walk(plan, work, scope.scalars)
            lane = own_lane(plan, work, scope, team)
            sinks = [own_sink(plan, row.head, scope.tensors) for row in lane.rows]
            begin_row(plan, reference, lane, work, scope)
            o.fill(0.0)
            if walk.tiles > 0:
                if cutlass.const_expr(plan.config.ragged_keys and not plan.config.is_fp8):
                    self.clear_tail_rows(scope, walk, v_state)
                hidden = hidden_steps(plan, work, walk, scope.scalars, team)
                for _ in cutlass.range(hidden, unroll=1):
                    # Wait before releasing: an arrival on a stage that is not full yet would
                    # complete the empty barrier's previous phase.
                    pipes.k.wait(k_state)
                    pipes.k.release(k_state.index)
                    k_state.advance()
                    self.wait_turn(team)
                    self.pass_turn(team)
                    values.wait(v_state)
                    values.release(v_state.index)
                    v_state.advance()
                pipes.q.wait(q_state, team)
                k_state, v_state = self.sweep(scope, lane, walk, hidden, tile, k_state, v_state)
                q_state.advance()
                over_lanes(reference.row_sum)
            factors = finish_rows(plan, work, lane, reference, sinks, scope)
            store_o(plan, work, lane, o, factors, scope)
        self.close_turns(team)
        # Keep shared memory until the last copy has read it; a thread without copies does not wait.
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def sweep(
        self,
        scope: Scope,
        lane: Lane,
        walk: Walk,
        hidden: Int32,
        tile: Tile,
        k_state: PipelineState,
        v_state: PipelineState,
    ) -> tuple[PipelineState, PipelineState]:
        """Process all tiles from `hidden` on, at least one; return the pipeline states
        after them.
        """
        plan, pipes = self.plan, scope.pipes
        pipes.k.wait(k_state)
        self.take_first(scope, lane, walk, hidden, tile, k_state.index)
        k_state.advance()
        for step in cutlass.range(hidden + 1, walk.tiles, unroll=1):
            pipes.k.wait(k_state)
            self.wait_turn(lane.team)
            issue_qk(plan, tile.scores, tile.q, tile.k[None, None, None, k_state.index])
            pipes.v.wait(v_state)
            self.issue_pv(tile, v_state.index)
            self.pass_turn(lane.team)
            warpgroup.wait_group(1)
            sums = self.weigh(scope, lane, walk, step, tile)
            pipes.v.release(v_state.index)
            v_state.advance()
            self.settle(scope, lane, walk, step, tile, k_state.index, sums)
            k_state.advance()
        pipes.q.release(lane.tile)
        pipes.v.wait(v_state)
        self.issue_pv(tile, v_state.index)
        warpgroup.wait_group(0)
        pipes.v.release(v_state.index)
        v_state.advance()
        return k_state, v_state

    @cute.jit
    def take_first(
        self, scope: Scope, lane: Lane, walk: Walk, step: Int32, tile: Tile, stage: Int32
    ) -> None:
        """Process the first weighed tile, whose K is loaded.

        No product is in flight, and there is no maximum to refer to yet. stage: stage of K.
        """
        take_up(tile.reference, self.begin_anew(scope, lane, walk, step, tile, stage, None))
        scope.pipes.k.release(stage)

    @cute.jit
    def settle(
        self,
        scope: Scope,
        lane: Lane,
        walk: Walk,
        step: Int32,
        tile: Tile,
        stage: Int32,
        sums: tuple[Float32, Float32],
    ) -> None:
        """Add the sums of a tile, after weighing it anew if they show that the maximum is too
        small.

        stage: stage of K.
        """
        reference, all_rows = tile.reference, Boolean(False)
        if cutlass.const_expr(self.plan.config.is_fp8):
            # In e4m3 maxima may lag by little. In the first unmasked tile most rows ask for a new
            # maximum, above all rows with few visible keys so far. Updating all rows at once saves
            # most of the later weighings. It depends on the walk alone, so rows stay independent.
            all_rows = step == walk.masked
        mine = too_large(lane, reference, sums) or all_rows
        if any_of(self.plan.barriers, "warpgroup", lane.team, mine):
            rows = asked(reference, sums)
            rows = (rows[0] or all_rows, rows[1] or all_rows)
            sums = self.begin_anew(scope, lane, walk, step, tile, stage, rows)
        take_up(reference, sums)
        scope.pipes.k.release(stage)

    @cute.jit
    def make_tile(self, scope: Scope, team: Int32) -> Tile:
        """Make the operands and registers of the warpgroup's query tile."""
        plan, layout, buffers = self.plan, self.plan.layout, scope.buffers
        scores = accumulator(make_qk_mma(plan), layout.rows, layout.tile_n)
        o = accumulator(make_pv_mma(plan, layout.o_columns), layout.rows, layout.o_columns)
        products, values = (), buffers.v
        if cutlass.const_expr(plan.config.is_fp8):
            products, values = make_products(plan, scores), buffers.vt
        terms, q = plan.config.q_terms, q_operand(plan, make_qk_mma(plan), buffers.q)
        return Tile(
            scores,
            p_registers(plan),
            o,
            products,
            make_reference(plan),
            tuple(q[None, None, None, team * terms + term] for term in reversed(range(terms))),
            k_operand(plan, make_qk_mma(plan), buffers.k),
            tuple(
                v_operand(plan, make_pv_mma(plan), values, Int32(number))
                for number in range(layout.o_parts)
            ),
        )

    @cute.jit
    def issue_pv(self, tile: Tile, stage: Int32) -> None:
        """Issue O += P V. stage: stage of V."""
        issue_pv(self.plan, tile.o, tile.p, tile.v[0][None, None, None, stage])

    @cute.jit
    def begin_anew(
        self,
        scope: Scope,
        lane: Lane,
        walk: Walk,
        step: Int32,
        tile: Tile,
        stage: Int32,
        rows: tuple[Boolean, Boolean] | None,
    ) -> tuple[Float32, Float32]:
        """Find new maxima and weigh the tile; return the sums of its weights.

        No product may be in flight. The scores of the tile are computed again, since their
        registers may hold weights already.

        Args:
            stage: stage of K.
            rows: which rows get a new maximum; None for all.
        """
        plan, scalars = self.plan, scope.scalars
        issue_qk(plan, tile.scores, tile.q, tile.k[None, None, None, stage])
        warpgroup.wait_group(0)
        self.prepare(scope, lane, walk, step, tile, 0, cute.size(tile.scores))
        tops = largest(plan, tile.scores, tile.reference)
        if cutlass.const_expr(rows is not None):
            tops = tops_of(tile.reference, tops, rows)
        factors = refer_to(plan, tops, tile.reference, scalars)
        rescale(tile.o, factors)
        bring_near(plan, tile.scores, tile.reference, scalars)
        every = cute.size(tile.scores)
        exponentiate(plan, tile.scores, tile.reference, scalars, 0, every)
        round_weights(plan, tile.scores, tile.p)
        return tile_sums(plan, tile.scores, tile.p)

    @cute.jit
    def weigh(
        self, scope: Scope, lane: Lane, walk: Walk, step: Int32, tile: Tile
    ) -> tuple[Float32, Float32]:
        """Weigh the tile with the present maxima; return the sums of the weights.

        Waits for P V of the previous tile, whose P is in the registers of this one's.
        """
        plan, scores = self.plan, tile.scores
        every = cute.size(scores)
        early = every * plan.layout.shape.early // 16 // PIECE * PIECE
        if cutlass.const_expr(early > 0):
            self.prepare(scope, lane, walk, step, tile, 0, early)
        exponentiate(plan, scores, tile.reference, scope.scalars, 0, early)
        # The branch in `prepare` keeps ptxas from moving the wait before the first part.
        if cutlass.const_expr(every > early):
            self.prepare(scope, lane, walk, step, tile, early, every)
        warpgroup.wait_group(0)
        exponentiate(plan, scores, tile.reference, scope.scalars, early, every)
        round_weights(plan, scores, tile.p)
        return tile_sums(plan, scores, tile.p)

    @cute.jit
    def prepare(
        self,
        scope: Scope,
        lane: Lane,
        walk: Walk,
        step: Int32,
        tile: Tile,
        begin: cutlass.Constexpr,
        end: cutlass.Constexpr,
    ) -> None:
        """Apply softcap, functions of positions and mask to elements [begin, end) of S."""
        plan, scores, reference = self.plan, tile.scores, tile.reference
        first = Int32(0)
        if cutlass.const_expr(plan.config.moves_all):
            first = first_key(plan, walk, step)
        if cutlass.const_expr(plan.config.scales_first):
            change(plan, scores, reference, lane, scope, first, begin, end)
        if cutlass.const_expr(plan.config.hides_all):
            hide(plan, scores, reference, lane, scope, first, begin, end)
        if step < walk.masked:
            key = first_key(plan, walk, step)
            if cutlass.const_expr(plan.config.hides_blocks):
                hide(plan, scores, reference, lane, scope, key, begin, end)
            mask(plan, scores, reference, lane, key, begin, end)

    @cute.jit
    def clear_tail_rows(self, scope: Scope, walk: Walk, v_state: object) -> None:
        """Zero the rows of the block's first V tile past the keys that any row sees.

        Their weight is 0, but 0 * NaN is NaN, and memory that a length or an offset excludes may
        hold anything. Rows past the end of the tensor are zeros from TMA. v_state: state of the
        tile, or of the piece that this warpgroup multiplies.
        """
        plan, layout = self.plan, self.plan.layout
        valid = walk.seen_end - first_key(plan, walk, Int32(0))
        if valid < layout.tile_n:
            # One lane may still be signalling for the warp that the previous block is done.
            cute.arch.sync_warp()
            scope.pipes.v.wait(v_state)
            thread, _, _ = cute.arch.thread_idx()
            threads = self.role.threads // layout.sharers
            if cutlass.const_expr(layout.sharers > 1):
                thread = thread % threads
            line = layout.panel(layout.v_columns)
            in_tile = layout.v_columns // line
            zeros = cute.make_rmem_tensor(line, IO_TYPES[plan.config.dtype])
            zeros.fill(0.0)
            row = valid + thread
            while row < layout.tile_n:
                for panel in cutlass.range_constexpr(in_tile):
                    # A line of zeros needs no swizzle: it stays within the line.
                    place = (v_state.index * in_tile + panel) * layout.tile_n + row
                    start = scope.buffers.v + place * line
                    cute.autovec_copy(zeros, cute.make_tensor(start, cute.make_layout(line)))
                row += threads
            cute.arch.fence_proxy("async.shared", space="cta")
            meet(plan.barriers, "cleared")

    @cute.jit
    def open_turns(self, team: Int32) -> None:
        """Give the first turn to warpgroup 0."""
        if cutlass.const_expr(self.takes_turns):
            if team == self.role.teams - 1:
                self.pass_turn(team)

    @cute.jit
    def close_turns(self, team: Int32) -> None:
        """Wait for the last turn, so that no arrival is left pending."""
        if cutlass.const_expr(self.takes_turns):
            if team == 0:
                self.wait_turn(team)

    @cute.jit
    def wait_turn(self, team: Int32) -> None:
        """Wait until the previous warpgroup has issued its products."""
        if cutlass.const_expr(self.takes_turns):
            meet(self.plan.barriers, "turn", team)

    @cute.jit
    def pass_turn(self, team: Int32) -> None:
        """Arrive for the next warpgroup."""
        if cutlass.const_expr(self.takes_turns):
            following = team + 1 if team < self.role.teams - 1 else Int32(0)
            arrive(self.plan.barriers, "turn", following)

    @property
    def takes_turns(self) -> bool:
        return self.plan.layout.ordered and self.role.teams > 1
