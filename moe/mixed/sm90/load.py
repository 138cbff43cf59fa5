"""Load role: one warp fetches x by TMA and the weights as they lie, a stage of K at a time."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64

from kernelkit.boxes import Box, BoxPosition, copy_in
from kernelkit.pipelines import consumer_state, producer_state
from moe.mixed.fragments import DEPTH
from moe.mixed.sm90.args import Scope
from moe.mixed.sm90.plan import TILE_STAGES, MixedPlan
from moe.sm100.args import Tile
from moe.sm100.roles.scheduler import read_tile


def x_box(plan: MixedPlan) -> Box:
    """One unit of K."""
    return Box(plan.config.tile_rows, DEPTH, BFloat16)


class Load:
    """Fills the ring. Rows behind the last one, and K behind its end, arrive as zeros of x; the
    weights that these are multiplied by are those before."""

    def __init__(self, plan: MixedPlan) -> None:
        self.plan = plan
        self.role = plan.roles["load"]

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
                for step in cutlass.range(steps, unroll=1):
                    pipes.ab.acquire(state)
                    self.fetch(scope, tile, step, state.index)
                    state.advance()

    @cute.jit
    def fetch(self, scope: Scope, tile: Tile, step: Int32, stage: Int32) -> None:
        """One stage of a tile."""
        plan, sizes, buffers = self.plan, scope.sizes, scope.buffers
        barrier, box = scope.pipes.ab.barrier(stage), x_box(plan)
        every = scope.tensors.weights[tile.expert, None].iterator.toint()
        for part in cutlass.range_constexpr(plan.tall):
            row = cutlass.min(tile.n * plan.tall + part, sizes.tall - 1)
            for unit in cutlass.range_constexpr(plan.units):
                number = row * sizes.units + cutlass.min(step * plan.units + unit, sizes.units - 1)
                source = every + Int64(number) * plan.unit_bytes
                place = (stage * plan.tall + part) * plan.units + unit
                target = buffers.w.toint() + place * plan.unit_bytes
                copy_bytes(source, target, plan.unit_bytes, barrier)
        for unit in cutlass.range_constexpr(0 if plan.config.gather else plan.units):
            place = BoxPosition(tile.first, (step * plan.units + unit) * DEPTH, 0, 0)
            copy_in(scope.x, box, place, box.at(buffers.x, stage * plan.units + unit), barrier)


@cute.jit
def copy_bytes(
    source: Int64, target: Int32, size: cutlass.Constexpr, barrier: cute.Pointer
) -> None:
    """Start to copy neighbouring bytes of global memory, whole 16 of them, to shared memory."""
    with cute.arch.elect_one():
        cute.arch.inline_ptx(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
            f"[{{$r0}}], [{{$r1}}], {size}, [{{$r2}}];",
            read_only_args=[target, source, Int32(barrier.toint())],
        )
