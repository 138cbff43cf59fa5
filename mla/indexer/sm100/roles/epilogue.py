"""Epilogue role: tensor memory to registers, ReLU, weights, the sum over heads, and the output.

Two teams of four warps take alternate tiles; each thread has one key.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from kernelkit.device import tmem
from kernelkit.device.pipelines import consumer_state
from mla.indexer.scores_config import KEYS
from mla.indexer.scores_device import Run, relu, run_from, store_score
from mla.indexer.shared.args import Scope, tiles_of
from mla.indexer.sm100.plan import ACC_STAGES, ROLES, TEAMS, ScoresPlan

SUMS = 4  # partial sums over neighbouring heads


class Epilogue:
    """Device code that reads the accumulators and stores the scores."""

    def __init__(self, plan: ScoresPlan) -> None:
        self.plan = plan
        self.role = ROLES["epilogue"]

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Run the role. Both teams count all tiles."""
        share, thread = scope.share, cute.arch.thread_idx()[0]
        team = cute.arch.make_warp_uniform(thread // self.role.team_threads)
        acc, turn = consumer_state(ACC_STAGES), Int32(0)
        begin = Int32(0)
        while begin < self.plan.config.tokens:
            run = run_from(scope.buffers.spans, begin)
            begin = run.end
            for tile in cutlass.range(share.cta, tiles_of(run), share.ctas, unroll=1):
                if turn == team:
                    scope.pipes.acc.wait(acc)
                    tmem.order_after_wait()
                    self.take(scope, run, tile, acc.index)
                acc.advance()
                turn = (turn + 1) % TEAMS

    @cute.jit
    def take(self, scope: Scope, run: Run, tile: Int32, stage: Int32) -> None:
        """Store the scores of a tile, token by token.

        stage: stage of the accumulators, which is released after the last token.
        """
        lane = cute.arch.thread_idx()[0] % KEYS
        key = tile * KEYS + lane
        for token in cutlass.range(run.begin, run.end, unroll=1):
            value = self.score(scope, token, token + 1 == run.end, stage, lane)
            exists = key < scope.buffers.spans[token, 1]
            row, out = scope.share.first + token, self.plan.config.out
            store_score(scope.params, row, key, value, exists, out)

    @cute.jit
    def score(
        self, scope: Scope, token: Int32, is_last: Boolean, stage: Int32, lane: Int32
    ) -> Float32:
        """Return the score of the thread's key for one token.

        token: index of the token in the CTA.
        is_last: whether the token is the last of its run.
        """
        plan, buffers = self.plan, scope.buffers
        heads, part = plan.config.heads, plan.part
        sums = cute.make_rmem_tensor(SUMS, Float32)
        sums.fill(0.0)
        for first in cutlass.range_constexpr(0, heads, part):
            column = token * heads + first
            products = cute.make_rmem_tensor(part, Float32)
            source = tmem.tile_at(buffers.tmem, stage * plan.n + column, part)
            tmem.load_row(source, products, lane)
            tmem.wait_loads()
            if cutlass.const_expr(first + part == heads):
                if is_last:
                    tmem.order_before_signal()
                    scope.pipes.acc.release(stage)
            for head in cutlass.range_constexpr(0, part, SUMS):
                weights = cute.make_rmem_tensor(SUMS, Float32)
                near = (buffers.weights.iterator + (column + head)).align(4 * SUMS)
                cute.autovec_copy(cute.make_tensor(near, weights.layout), weights)
                for index in cutlass.range_constexpr(0, SUMS, 2):
                    pair = (relu(products[head + index]), relu(products[head + index + 1]))
                    sums[index], sums[index + 1] = cute.arch.fma_packed_f32x2(
                        pair,
                        (weights[index], weights[index + 1]),
                        (sums[index], sums[index + 1]),
                    )
        return (sums[0] + sums[1]) + (sums[2] + sums[3])
