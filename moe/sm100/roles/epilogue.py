"""Epilogue role: four warps, a row of the tile per thread: global scale, SwiGLU, output.

One way: tensor memory to registers to global memory. A subtile holds whole pairs of gate and up and
whole blocks of a quantised output, so that nothing is carried from one to the next.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from kernelkit import tmem
from kernelkit.pipelines import draining
from moe.device.quantise import largest_magnitude
from moe.device.swiglu import swiglu
from moe.sm100.args import Scope, Tile
from moe.sm100.plan import ACC_STAGES, ROLES, TILE_STAGES, GroupedPlan
from moe.sm100.roles.outputs import Place, store_codes, store_quantised, store_values, tell_amax
from moe.sm100.roles.scheduler import told


class Epilogue:
    """Empties the accumulators."""

    def __init__(self, plan: GroupedPlan) -> None:
        self.plan = plan
        self.role = ROLES["epilogue"]

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warps."""
        pipes = scope.pipes
        tiles, acc = draining(TILE_STAGES), draining(ACC_STAGES)
        top = Float32(0.0)
        going = Int32(1)
        while going > 0:
            pipes.tile_epilogue.wait(tiles)
            tile = told(scope, tiles.index)
            pipes.tile_epilogue.release(tiles.index)
            tiles.advance()
            going = tile.valid
            if going > 0:
                pipes.acc.wait(acc)
                tmem.order_after_wait()
                found = self.do_tile(scope, tile, acc.index)
                top = cute.arch.fmax(top, found, nan=True)
                acc.advance()
        if cutlass.const_expr(self.plan.config.amax):
            tell_amax(scope.tensors.amax, top)

    @cute.jit
    def do_tile(self, scope: Scope, tile: Tile, stage: Int32) -> Float32:
        """All columns; the largest magnitude of this thread's outputs, where somebody asks."""
        config = self.plan.config
        thread, _, _ = cute.arch.thread_idx()
        exists = thread < tile.rows
        place = Place(tile.first + thread, tile.block, thread, tile.n * config.tile_outputs)
        factor = self.factor(scope, tile, place.row, exists)
        codes = cute.make_rmem_tensor(config.tile_outputs, cutlass.Uint32)
        top = Float32(0.0)
        for subtile in cutlass.range_constexpr(config.tile_n // config.subtile):
            values = self.take(scope, stage, subtile)
            values.store(values.load() * factor)
            if cutlass.const_expr(config.swiglu):
                values = swiglu(config, scope.numbers, values)
            if cutlass.const_expr(config.amax):
                top = cute.arch.fmax(top, largest_magnitude(values), nan=True)
            first = subtile * config.subtile // config.inputs_of_output
            if cutlass.const_expr(config.out_format is None):
                store_values(config, scope.tensors, place, (first, exists), values)
            else:
                store_quantised(config, scope.tensors, place, (first, exists), (values, codes))
        if cutlass.const_expr(config.out_format is not None):
            store_codes(config, scope.tensors, place, exists, codes)
        return top if exists else Float32(0.0)

    @cute.jit
    def take(self, scope: Scope, stage: Int32, subtile: cutlass.Constexpr) -> cute.Tensor:
        """Columns of the thread's row; behind the last of them the accumulator is free."""
        config = self.plan.config
        thread, _, _ = cute.arch.thread_idx()
        values = cute.make_rmem_tensor(config.subtile, Float32)
        column = stage * config.tile_n + subtile * config.subtile
        source = tmem.tile_at(scope.buffers.tmem, column, config.subtile)
        tmem.load_row(source, values, thread)
        tmem.wait_loads()
        if cutlass.const_expr((subtile + 1) * config.subtile == config.tile_n):
            tmem.order_before_signal()
            scope.pipes.acc.release(stage)
        return values

    @cute.jit
    def factor(self, scope: Scope, tile: Tile, row: Int32, exists: Boolean) -> Float32:
        """What products of the row are times: before anything that is not linear."""
        tensors, config = scope.tensors, self.plan.config
        factor = Float32(1.0)
        if cutlass.const_expr(config.format.has_global):
            index = Int32(0)
            if cutlass.const_expr(config.row_scale):
                index = row if exists else Int32(0)
            factor = tensors.a_scale[index] * tensors.b_scale[tile.expert]
        return factor
