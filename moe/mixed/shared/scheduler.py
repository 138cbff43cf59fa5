"""Scheduler role: that of block-scaled operands, with the edges of this plan."""

import cutlass.cute as cute
from cutlass import Int32
from cutlass.pipeline import PipelineState

from moe.mixed.plan import ProductPlan
from moe.mixed.shared.args import Scope
from moe.sm100.args import Tile
from moe.sm100.roles.scheduler import Scheduler as Walk
from moe.sm100.roles.scheduler import write_tile


class Scheduler(Walk):
    """Fills the tile queue."""

    def __init__(self, plan: ProductPlan) -> None:
        self.plan = plan
        self.role = plan.roles["scheduler"]

    def tiles_of(self, rows: Int32) -> Int32:
        """Row tiles of an expert with so many rows: none where another launch has it."""
        config, tiles = self.plan.config, super().tiles_of(rows)
        if config.most:
            tiles *= Int32(rows <= config.most)
        if config.least:
            tiles *= Int32(rows >= config.least)
        return tiles

    @cute.jit
    def publish(self, scope: Scope, state: PipelineState, tile: Tile) -> None:
        """To the roles of this CTA, once each has read what stood there."""
        readers = [getattr(scope.pipes, name) for name in self.plan.tile_names]
        for reader in readers:
            reader.wait_free(state)
        if cute.arch.lane_idx() == 0:
            write_tile(scope, state.index, tile)
        for reader in readers:
            reader.signal(state.index)
