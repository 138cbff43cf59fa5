"""MMA role: one warp issues the products of weights in tensor memory and rows of x.

Products are as wide as the tile, or half as wide where the expert has no more rows in it, and so
on: the rows of x that are not multiplied are not fetched.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.utils import blackwell_helpers as sm100

from kernelkit.device import tmem
from kernelkit.device.pipelines import consumer_state, cta_group, producer_state
from kernelkit.device.umma import accumulator, issue, shared
from kernelkit.plan import hw
from moe.mixed.fragments import DEPTH
from moe.mixed.plan import TILE_STAGES
from moe.mixed.shared.args import Scope
from moe.mixed.shared.types import X_TYPES
from moe.mixed.sm100.math import a_column
from moe.mixed.sm100.plan import MixedPlan
from moe.sm100.roles.scheduler import read_tile

K = OperandMajorMode.K


class Mma:
    """Owns the tensor core."""

    def __init__(self, plan: MixedPlan) -> None:
        self.plan = plan
        self.role = plan.roles["mma"]

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warp."""
        plan, pipes = self.plan, scope.pipes
        tiles, state = consumer_state(TILE_STAGES), consumer_state(plan.stages)
        weights, acc = consumer_state(plan.a_stages), producer_state(plan.acc_stages)
        steps = (scope.sizes.units + plan.units - 1) // plan.units
        going = Int32(1)
        while going > 0:
            pipes.tile_mma.wait(tiles)
            tile = read_tile(scope, tiles.index)
            pipes.tile_mma.release(tiles.index)
            tiles.advance()
            going = tile.valid
            if going > 0:
                pipes.acc.wait_free(acc)
                for step in cutlass.range(steps, unroll=1):
                    pipes.x.wait(state)
                    pipes.a.wait(weights)
                    tmem.order_after_wait()
                    column = acc.index * plan.sum_columns
                    self.fitting(scope, tile.rows, 0, column, step, (state.index, weights.index))
                    pipes.x.release(state.index)
                    pipes.a.release(weights.index)
                    state.advance()
                    weights.advance()
                pipes.acc.signal(acc.index)
                acc.advance()

    @cute.jit
    def fitting(
        self,
        scope: Scope,
        rows: Int32,
        number: cutlass.Constexpr[int],
        column: Int32,
        step: Int32,
        stages: tuple[Int32, Int32],
    ) -> None:
        """`add` with the least of the plan's widths from `number` on that has all rows."""
        widths = self.plan.widths
        if cutlass.const_expr(number + 1 == len(widths)):
            self.add(scope, widths[number], column, step, stages)
        elif rows > widths[number + 1]:
            self.add(scope, widths[number], column, step, stages)
        else:
            self.fitting(scope, rows, number + 1, column, step, stages)

    @cute.jit
    def add(
        self,
        scope: Scope,
        width: cutlass.Constexpr[int],
        column: Int32,
        step: Int32,
        stages: tuple[Int32, Int32],
    ) -> None:
        """D (+)= A B over a stage of K. column: of D. stages: of x and of the weights."""
        plan = self.plan
        for unit in cutlass.range_constexpr(plan.units):
            if cutlass.const_expr(unit == 0):
                self.add_unit(scope, width, column, unit, step > 0, stages)
            elif step * plan.units + unit < scope.sizes.units:
                self.add_unit(scope, width, column, unit, Boolean(True), stages)

    @cute.jit
    def add_unit(
        self,
        scope: Scope,
        width: cutlass.Constexpr[int],
        column: Int32,
        unit: cutlass.Constexpr[int],
        accumulate: Boolean,
        stages: tuple[Int32, Int32],
    ) -> None:
        """The same over a unit of K."""
        plan, buffers = self.plan, scope.buffers
        x = buffers.x + (stages[0] * plan.units + unit) * (plan.config.tile_rows * DEPTH)
        for block in cutlass.range_constexpr(plan.blocks):
            mma, tile = make_mma(plan, width), (hw.TMEM_LANES, width, DEPTH)
            # -> (MMA, MMA_M, MMA_N)
            d = accumulator(mma, tile, buffers.tmem, column + block * plan.config.tile_rows)
            # -> (MMA, MMA_M, MMA_K)
            a = weights_at(mma, tile, buffers.tmem, a_column(plan, stages[1], unit, block))
            layout = sm100.make_smem_layout_b(mma, tile, x.value_type, 1)
            # -> (MMA, MMA_N, MMA_K)
            b = mma.make_fragment_B(shared(x, layout))[None, None, None, 0]
            issue(mma, d, a, b, accumulate)


def weights_at(
    mma: cute.TiledMma, tile: tuple[int, int, int], base: cute.Pointer, column: Int32
) -> cute.Tensor:
    """128 rows of weights by a unit of K as the A operand, (MMA, 1, MMAs of the unit)."""
    element = mma.op.a_dtype
    layout = sm100.make_smem_layout_a(mma, tile, element, 1)
    one = mma.make_fragment_A(cute.make_tensor(base, layout.outer))[None, None, None, 0]
    return cute.make_tensor(cute.recast_ptr(base + column, dtype=element), one.layout)


def make_mma(plan: MixedPlan, width: int) -> cute.TiledMma:
    """Built anew wherever it is used: passed through a loop it stops being a constant."""
    element, source = X_TYPES[plan.config.x], tcgen05.OperandSource.TMEM
    shape = hw.TMEM_LANES, width
    return sm100.make_trivial_tiled_mma(
        element, element, K, K, Float32, cta_group(plan.edges), shape, source
    )
