"""Gather role: some warps fetch the rows of x from where the tokens are, swizzled as TMA would.

A warp has its share of the rows of a tile; eight lanes, or four, fetch a row and unit of K. Some
stages are in flight: the one that is told to be full is that many behind the one that was begun.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from kernelkit.device.boxes import swizzled
from kernelkit.device.pipelines import consumer_state, producer_state
from kernelkit.device.warp_mma import CHUNK_BYTES, copy_chunk
from kernelkit.plan import hw
from moe.mixed.fragments import DEPTH
from moe.mixed.plan import TILE_STAGES, ProductPlan
from moe.mixed.shared.args import Scope
from moe.sm100.args import Tile
from moe.sm100.roles.scheduler import read_tile

NO_ROW = -1


class Gather:
    """Fills the ring of x; rows that the expert does not have, and K behind its end, are zeros."""

    def __init__(self, plan: ProductPlan) -> None:
        self.plan = plan
        self.role = plan.roles["gather"]
        self.own = -(-plan.config.tile_rows // self.role.warps)  # rows of a warp
        self.lanes = plan.line // CHUNK_BYTES  # that fetch a row
        self.at_once = hw.WARP_THREADS // self.lanes  # rows of a warp

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warps."""
        pipes, plan = scope.pipes, self.plan
        tiles, state = consumer_state(TILE_STAGES), producer_state(plan.stages)
        steps = (scope.share.units + plan.units - 1) // plan.units
        begun, flying = Int32(0), Int32(0)
        going = Int32(1)
        while going > 0:
            pipes.tile_gather.wait(tiles)
            tile = read_tile(scope, tiles.index)
            pipes.tile_gather.release(tiles.index)
            tiles.advance()
            going = tile.valid
            if going > 0:
                sources = self.find_rows(scope, tile)
                for step in cutlass.range(steps, unroll=1):
                    pipes.x.wait_free(state)
                    self.fetch(scope, sources, step, state.index)
                    cute.arch.cp_async_commit_group()
                    begun += 1
                    flying += 1
                    if flying > plan.ahead:
                        self.wait(plan.ahead)
                        self.tell(scope, begun - flying)
                        flying -= 1
                    state.advance()
            # The queue has too few tiles of so few steps for one to be told when others begin.
            if (going == 0) | (steps * TILE_STAGES < plan.ahead):
                self.land(scope, begun, flying)
                flying = Int32(0)

    @cute.jit
    def land(self, scope: Scope, begun: Int32, flying: Int32) -> None:
        """Tell of all stages that are in flight."""
        self.wait(0)
        for behind in cutlass.range_constexpr(self.plan.ahead, 0, -1):
            if flying >= behind:
                self.tell(scope, begun - behind)

    @cute.jit
    def wait(self, flying: cutlass.Constexpr[int]) -> None:
        """Until all stages but so many are there, for the tensor core, too."""
        cute.arch.cp_async_wait_group(flying)
        cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def tell(self, scope: Scope, filling: Int32) -> None:
        """The stage of this filling of the ring is full."""
        scope.pipes.x.signal(filling % self.plan.stages)

    @cute.jit
    def find_rows(self, scope: Scope, tile: Tile) -> None:
        """The tokens of this warp's rows to its part of the table."""
        lane, warp, table = cute.arch.lane_idx(), self.warp(), scope.buffers.table
        cute.arch.sync_warp()
        for first in cutlass.range_constexpr(0, self.own, hw.WARP_THREADS):
            place = first + lane
            row = warp * self.own + place
            token = Int32(NO_ROW)
            if row < tile.rows:
                token = scope.tensors.rows[tile.first + row] // scope.sizes.slots
            if place < self.own:
                table[row] = token
        cute.arch.sync_warp()

    @cute.jit
    def fetch(self, scope: Scope, _sources: None, step: Int32, stage: Int32) -> None:
        """Begin to copy this warp's rows of a stage, whose tokens are in the table."""
        lane, plan, x = cute.arch.lane_idx(), self.plan, scope.x
        table = scope.buffers.table
        own_row, chunk = lane // self.lanes, lane % self.lanes
        size = plan.config.x_bits // 8
        width = cute.size(x, mode=[1])
        first = scope.buffers.x.toint() + stage * (plan.units * plan.x_bytes)
        column = (scope.share.first + step * plan.units) * DEPTH + chunk * (CHUNK_BYTES // size)
        columns = [column + unit * DEPTH for unit in range(plan.units)]
        for begin in cutlass.range_constexpr(0, self.own, self.at_once):
            row = self.warp() * self.own + begin + own_row
            exists = Boolean(begin + own_row < self.own)
            token = table[row] if exists else Int32(NO_ROW)
            source = x[cutlass.max(token, 0), None].iterator.toint()
            place = first + swizzled(row * plan.line + chunk * CHUNK_BYTES, plan.line)
            if exists:
                for unit in cutlass.range_constexpr(plan.units):
                    valid = (token >= 0) & (columns[unit] < width)
                    column = columns[unit] if valid else Int32(0)
                    target = place + unit * plan.x_bytes
                    copy_chunk(target, source + Int64(column) * size, valid)

    def warp(self) -> Int32:
        """Of the role."""
        return cute.arch.make_warp_uniform(cute.arch.warp_idx()) - self.role.first_warp
