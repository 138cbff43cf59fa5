"""Load role: one warp fetches x, w and their scale factors by TMA, a stage of K at a time.

Of a pair each CTA fetches its half of the rows of both, and all scale factors of w.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint8

from kernelkit.boxes import BoxPosition, copy_in
from kernelkit.pipelines import consumer_state, producer_state
from moe.config import WINDOW, WINDOW_STEP
from moe.formats import SCALE_ROWS
from moe.sm100.args import Scope, Tile
from moe.sm100.boxes import scale_box, w_box, x_box
from moe.sm100.plan import LINE, ROLES, TILE_STAGES, GroupedPlan
from moe.sm100.roles.scheduler import rank_in_tile, read_tile


class Load:
    """Fills the ring. Rows behind the last one, and K behind its end, arrive as zeros."""

    def __init__(self, plan: GroupedPlan) -> None:
        self.plan = plan
        self.role = ROLES["load"]

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warp."""
        pipes = scope.pipes
        tiles, state = consumer_state(TILE_STAGES), producer_state(self.plan.stages)
        k_stages = -(-scope.sizes.k // self.plan.k_stage)
        going = Int32(1)
        while going > 0:
            pipes.tile_load.wait(tiles)
            tile = read_tile(scope, tiles.index)
            pipes.tile_load.release(tiles.index)
            tiles.advance()
            going = tile.valid
            if going > 0:
                for step in cutlass.range(k_stages, unroll=1):
                    pipes.ab.acquire(state)
                    self.fetch(scope, tile, step, state.index)
                    state.advance()
        if cutlass.const_expr(self.plan.config.ctas == 2):
            for _ in cutlass.range(self.plan.stages, unroll=1):
                pipes.ab.wait_free(state)
                state.advance()

    @cute.jit
    def fetch(self, scope: Scope, tile: Tile, step: Int32, stage: Int32) -> None:
        """One stage of a tile."""
        plan, operands, buffers = self.plan, scope.operands, scope.buffers
        barrier, rank = scope.pipes.ab.barrier(stage), rank_in_tile(plan)
        column, n = step * LINE, tile.n * plan.config.tile_n
        box = x_box(plan)
        place = BoxPosition(tile.first + rank * plan.x_rows, column, 0, 0)
        copy_in(operands.x, box, place, box.at(in_bytes(buffers.x), stage), barrier)
        box, window = w_box(plan), Int32(0)
        if cutlass.const_expr(plan.pads_w):  # the last one ends with the row
            column, steps = Int32(0), scope.sizes.k // WINDOW_STEP
            window = cutlass.min(step * (WINDOW // WINDOW_STEP), steps - WINDOW // WINDOW_STEP)
        place = BoxPosition(n + rank * plan.w_rows, column, window, tile.expert)
        copy_in(operands.w, box, place, box.at(in_bytes(buffers.w), stage), barrier)
        box, atom = scale_box(plan), step * plan.atoms
        place = BoxPosition(atom, 0, tile.block + rank, 0)
        copy_in(operands.x_scales, box, place, box.at(buffers.x_scales, stage), barrier)
        for block in cutlass.range_constexpr(plan.w_blocks):
            place = BoxPosition(atom, 0, n // SCALE_ROWS + block, tile.expert)
            target = box.at(buffers.w_scales, stage * plan.w_blocks + block)
            copy_in(operands.w_scales, box, place, target, barrier)


def in_bytes(buffer: cute.Pointer) -> cute.Pointer:
    """As TMA sees it."""
    return cute.recast_ptr(buffer, dtype=Uint8)
