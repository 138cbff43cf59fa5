"""Scheduler role: that of Blackwell, with the edges of this plan."""

import cutlass
import cutlass.cute as cute
from cutlass.pipeline import PipelineState

from moe.mixed.sm90.args import Scope
from moe.mixed.sm90.plan import MixedPlan
from moe.sm100.args import Tile
from moe.sm100.roles.scheduler import Scheduler as Walk
from moe.sm100.roles.scheduler import write_tile


class Scheduler(Walk):
    """Fills the tile queue."""

    def __init__(self, plan: MixedPlan) -> None:
        self.plan = plan
        self.role = plan.roles["scheduler"]

    @cute.jit
    def publish(self, scope: Scope, state: PipelineState, tile: Tile) -> None:
        """To the roles of this CTA, once each has read what stood there."""
        pipes = scope.pipes
        pipes.tile_load.wait_free(state)
        pipes.tile_math.wait_free(state)
        if cutlass.const_expr(self.plan.config.gather):
            pipes.tile_gather.wait_free(state)
        if cute.arch.lane_idx() == 0:
            write_tile(scope, state.index, tile)
        pipes.tile_load.signal(state.index)
        pipes.tile_math.signal(state.index)
        if cutlass.const_expr(self.plan.config.gather):
            pipes.tile_gather.signal(state.index)
