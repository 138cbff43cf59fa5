"""Epilogue role: a warpgroup makes rows of the output of sums in tensor memory, some at a time."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernelkit.device import tmem
from kernelkit.device.pipelines import consumer_state
from kernelkit.device.tmem import fragment_at, load_sums
from moe.mixed.config import HALVES
from moe.mixed.plan import CHUNK, TILE_STAGES
from moe.mixed.shared.args import Scope
from moe.mixed.shared.output import meet, own_rows, put, take
from moe.mixed.sm100.plan import MixedPlan
from moe.sm100.args import Tile
from moe.sm100.roles.scheduler import read_tile

TEAM = 0  # of those who store, of which there is one


class Epilogue:
    """Empties the accumulators."""

    def __init__(self, plan: MixedPlan) -> None:
        self.plan = plan
        self.role = plan.roles["epilogue"]

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warps."""
        pipes, plan = scope.pipes, self.plan
        tiles, acc = consumer_state(TILE_STAGES), consumer_state(plan.acc_stages)
        going = Int32(1)
        while going > 0:
            pipes.tile_epilogue.wait(tiles)
            tile = read_tile(scope, tiles.index)
            pipes.tile_epilogue.release(tiles.index)
            tiles.advance()
            going = tile.valid
            if going > 0:
                pipes.acc.wait(acc)
                tmem.order_after_wait()
                self.store(scope, tile, acc.index)
                acc.advance()

    @cute.jit
    def store(self, scope: Scope, tile: Tile, stage: Int32) -> None:
        """A tile to global memory. The accumulators are free once its last rows have been read."""
        plan, config = self.plan, self.plan.config
        rows = min(CHUNK, config.tile_rows)
        chunks = config.tile_rows // rows
        own = own_rows(plan, scope, tile, TEAM)
        meet(TEAM)  # the rows of the tile before have been read
        for chunk in cutlass.range_constexpr(chunks):
            if chunk * rows < tile.rows:
                buffer = scope.buffers.out.toint() + chunk % 2 * plan.out_bytes
                for part in cutlass.range_constexpr(plan.parts):  # registers: one at a time
                    first = stage * plan.sum_columns + chunk * rows
                    sums = self.read(scope, first, part, rows)
                    if cutlass.const_expr(part + 1 == plan.parts):
                        if cutlass.const_expr(chunk + 1 == chunks):
                            self.release(scope, stage)
                        elif (chunk + 1) * rows >= tile.rows:
                            self.release(scope, stage)
                    put(plan, scope, TEAM, chunk, buffer, [sums], own, part)
                meet(TEAM)
                take(plan, scope, tile, TEAM, chunk, buffer)

    @cute.jit
    def release(self, scope: Scope, stage: Int32) -> None:
        """The accumulators of the tile may be written."""
        tmem.order_before_signal()
        scope.pipes.acc.release(stage)

    @cute.jit
    def read(
        self,
        scope: Scope,
        first: Int32,
        part: cutlass.Constexpr[int],
        rows: cutlass.Constexpr[int],
    ) -> cute.Tensor:
        """A fragment of 64 rows of weights, and of so many rows of x, of which the first one is
        column `first` of the first accumulator."""
        block, half = part // HALVES, part % HALVES
        column = first + block * self.plan.config.tile_rows
        return load_sums(fragment_at(scope.buffers.tmem, column, half), rows)
