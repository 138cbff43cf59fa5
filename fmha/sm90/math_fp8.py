"""Math role where K and V are e4m3: P V of a tile is a sum of few bits, and is added to O in fp32.

It goes to registers of its own where there are enough: then S of the next tile is issued first, and
P V is added under the softmax. Else it goes, some columns of O at a time, to those of S, whose
weights are P by then, and S is issued when they have been added. Either way nothing of a
warpgroup's own runs under its softmax, but products of the others do.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup
from cutlass.pipeline import PipelineState

from fmha.shared.args import Scope, Walk
from fmha.shared.lanes import Lane
from fmha.shared.two_rows import exponentiate, round_weights, tile_sums
from fmha.sm90.layout import Layout
from fmha.sm90.math import Math, Tile
from fmha.sm90.products import issue_pv, issue_qk
from fmha.sm90.split import split_q
from kernelkit.device.online_softmax import bounded_factor


def waits_for_parts(layout: Layout, following: bool) -> list[int]:
    """For each part of P V how many groups of products may be in flight when it is to be added.
    following: S of another tile is issued, too."""
    shape, waits = layout.shape, []
    for part in range(layout.o_parts):
        behind = min(shape.products - 1, layout.o_parts - 1 - part)
        waits.append(behind + (following and shape.before_s <= part))
    return waits


class MathFp8(Math):
    """S = Q K^T, softmax, O += P V, in e4m3."""

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
        """As in `Math`."""
        plan, pipes, reference = self.plan, scope.pipes, tile.reference
        if cutlass.const_expr(plan.config.q_terms == 2):
            powers = split_q(plan, lane, scope.buffers.q)
            for half in cutlass.range_constexpr(2):
                reference.factor[half] = bounded_factor(reference.factor[half], powers[half])
        pipes.k.wait(k_state)
        self.take_first(scope, lane, walk, hidden, tile, k_state.index)
        k_state.advance()
        for step in cutlass.range(hidden + 1, walk.tiles, unroll=1):
            pipes.k.wait(k_state)
            self.wait_turn(lane.team)
            if cutlass.const_expr(self.s_first):
                issue_qk(plan, tile.scores, tile.q, tile.k[None, None, None, k_state.index])
                pipes.vt.wait(v_state)
                self.issue_part(tile, 0, v_state.index)
                self.pass_turn(lane.team)
                warpgroup.wait_group(1)
            else:
                pipes.vt.wait(v_state)
                self.add_pv(lane, tile, v_state.index, k_state.index)
                warpgroup.wait_group(0)
                pipes.vt.release(v_state.index)
            sums = self.weigh(scope, lane, walk, step, tile)
            if cutlass.const_expr(self.s_first):
                pipes.vt.release(v_state.index)
            v_state.advance()
            self.settle(scope, lane, walk, step, tile, k_state.index, sums)
            k_state.advance()
        pipes.q.release(lane.tile)
        pipes.vt.wait(v_state)
        self.add_pv(lane, tile, v_state.index, None)
        pipes.vt.release(v_state.index)
        v_state.advance()
        return k_state, v_state

    @property
    def s_first(self) -> bool:
        """S of the next tile is issued before P V, which is one part."""
        return self.plan.layout.shape.before_s == 0

    @cute.jit
    def add_pv(
        self, lane: Lane, tile: Tile, stage: Int32, k_stage: cutlass.Constexpr | Int32
    ) -> None:
        """O += P V of a stage of V. Where there is a `k_stage`, S of what is in it is issued, too,
        and not waited for."""
        layout, ahead = self.plan.layout, len(tile.products)
        waits = waits_for_parts(layout, k_stage is not None)
        for part in cutlass.range_constexpr(ahead):
            self.issue_part(tile, part, stage)
        for part in cutlass.range_constexpr(layout.o_parts):
            warpgroup.wait_group(waits[part])
            self.add_part(tile, part)
            if cutlass.const_expr(part + ahead < layout.o_parts):
                self.issue_part(tile, part + ahead, stage)
            if cutlass.const_expr(part + 1 == layout.shape.before_s):
                self.issue_s(lane, tile, k_stage)

    @cute.jit
    def issue_s(self, lane: Lane, tile: Tile, k_stage: cutlass.Constexpr | Int32) -> None:
        """Issue S of a stage of K, if there is one; then it is the next warpgroup's turn."""
        if cutlass.const_expr(k_stage is not None):
            issue_qk(self.plan, tile.scores, tile.q, tile.k[None, None, None, k_stage])
            self.pass_turn(lane.team)

    @cute.jit
    def issue_part(self, tile: Tile, part: cutlass.Constexpr, stage: Int32) -> None:
        """Issue P V of the columns of part `part`. stage: of V."""
        product = tile.products[part % len(tile.products)]
        issue_pv(self.plan, product, tile.p, tile.v[part][None, None, None, stage])

    @cute.jit
    def add_part(self, tile: Tile, part: cutlass.Constexpr) -> None:
        """Add what P V of these columns has become to O."""
        product = tile.products[part % len(tile.products)]
        size = cute.size(product)
        for index in cutlass.range_constexpr(size):
            tile.o[part * size + index] = tile.o[part * size + index] + product[index]

    @cute.jit
    def weigh(
        self, scope: Scope, lane: Lane, walk: Walk, step: Int32, tile: Tile
    ) -> tuple[Float32, Float32]:
        """Weigh the tile with what there is to refer to; returns the sums of the weights."""
        every = cute.size(tile.scores)
        self.prepare(scope, lane, walk, step, tile, 0, every)
        if cutlass.const_expr(self.s_first):
            warpgroup.wait_group(0)
            self.add_part(tile, 0)  # behind the branch: exponentials run beside it
        exponentiate(self.plan, tile.scores, tile.reference, scope.scalars, 0, every)
        round_weights(self.plan, tile.scores, tile.p)
        return tile_sums(self.plan, tile.scores, tile.p)
