"""Load role: one warp fetches A, B and their scale factors by TMA, a stage of K at a time."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint8

from kernelkit.boxes import copy_in
from kernelkit.pipelines import draining, filling
from moe.sm100.args import Scope, Tile
from moe.sm100.boxes import a_box, b_box, scale_box
from moe.sm100.plan import LINE, ROLES, TILE_STAGES, GroupedPlan
from moe.sm100.roles.scheduler import told


class Load:
    """Fills the ring. Rows behind the last one, and K behind its end, arrive as zeros."""

    def __init__(self, plan: GroupedPlan) -> None:
        self.plan = plan
        self.role = ROLES["load"]

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warp."""
        pipes = scope.pipes
        tiles, state = draining(TILE_STAGES), filling(self.plan.stages)
        k_stages = -(-scope.sizes.k // self.plan.k_stage)
        going = Int32(1)
        while going > 0:
            pipes.tile_load.wait(tiles)
            tile = told(scope, tiles.index)
            pipes.tile_load.release(tiles.index)
            tiles.advance()
            going = tile.valid
            if going > 0:
                for step in cutlass.range(k_stages, unroll=1):
                    pipes.ab.acquire(state)
                    self.fetch(scope, tile, step, state.index)
                    state.advance()

    @cute.jit
    def fetch(self, scope: Scope, tile: Tile, step: Int32, stage: Int32) -> None:
        """One stage of a tile."""
        plan, operands, buffers = self.plan, scope.operands, scope.buffers
        barrier = scope.pipes.ab.barrier(stage)
        n, column = tile.n * plan.config.tile_n, step * LINE
        box = a_box(plan)
        target = box.at(in_bytes(buffers.a), stage)
        copy_in(operands.a, box, (tile.first, column, 0, 0), target, barrier)
        box = b_box(plan)
        place = (n, column, 0, tile.expert)
        copy_in(operands.b, box, place, box.at(in_bytes(buffers.b), stage), barrier)
        box, atom = scale_box(plan), step * plan.atoms
        place = (atom, 0, tile.block, 0)
        copy_in(operands.sfa, box, place, box.at(buffers.sfa, stage), barrier)
        for block in cutlass.range_constexpr(plan.b_blocks):
            place = (atom, 0, n // 128 + block, tile.expert)
            target = box.at(buffers.sfb, stage * plan.b_blocks + block)
            copy_in(operands.sfb, box, place, target, barrier)


def in_bytes(buffer: cute.Pointer) -> cute.Pointer:
    """As TMA sees it."""
    return cute.recast_ptr(buffer, dtype=Uint8)
