"""Load role: one warp fetches x and weights, a stage of K of each at a time."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernelkit.device.pipelines import consumer_state, producer_state
from moe.mixed.plan import TILE_STAGES
from moe.mixed.shared.args import Scope
from moe.mixed.shared.load import Loader
from moe.sm100.roles.scheduler import read_tile


class Load(Loader):
    """Fills both rings: that of x is free when the tensor core is done, that of weights when they
    are bf16."""

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warp."""
        pipes = scope.pipes
        tiles, state = consumer_state(TILE_STAGES), producer_state(self.plan.stages)
        units = self.plan.units
        steps = (scope.sizes.units + units - 1) // units
        going = Int32(1)
        while going > 0:
            pipes.tile_load.wait(tiles)
            tile = read_tile(scope, tiles.index)
            pipes.tile_load.release(tiles.index)
            tiles.advance()
            going = tile.valid
            if going > 0:
                size = self.stage_bytes(tile.rows, 0)
                for step in cutlass.range(steps, unroll=1):
                    pipes.w.acquire(state)
                    barrier = pipes.w.barrier(state.index)
                    self.fetch_weights(scope, tile, step, state.index, barrier)
                    if cutlass.const_expr(not self.plan.config.gather):
                        pipes.x.acquire_bytes(state, size)
                        barrier = pipes.x.barrier(state.index)
                        self.fetch_rows(scope, tile, step, state.index, barrier)
                    state.advance()
