"""Math role: each warpgroup makes bf16 of its rows of the weights and multiplies them by x.

While the tensor core works on one unit of K, whose weights it reads in registers, the next unit
becomes bf16 in others. Warpgroups wait for nobody but the ring, so that one may store its outputs
while others multiply.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.pipeline import PipelineState
from cutlass.utils import hopper_helpers as sm90

from kernelkit import hw
from kernelkit.pipelines import consumer_state
from kernelkit.shared_words import load
from kernelkit.umma import shared
from moe.mixed.config import ROWS
from moe.mixed.sm90.args import Scope
from moe.mixed.sm90.dequantise import WORDS, dequantise, factors_of, own_places
from moe.mixed.sm90.epilogue import store
from moe.mixed.sm90.plan import TILE_STAGES, UNITS, MixedPlan
from moe.mixed.fragments import DEPTH, THREADS
from moe.sm100.roles.scheduler import read_tile

K = OperandMajorMode.K


def make_mma(plan: MixedPlan) -> cute.TiledMma:
    """Weights from registers, x K-major from shared memory."""
    tile, source = (ROWS, plan.config.tile_rows), warpgroup.OperandSource.RMEM
    return sm90.make_trivial_tiled_mma(BFloat16, BFloat16, K, K, Float32, (1, 1, 1), tile, source)


def x_operand(plan: MixedPlan, pointer: cute.Pointer) -> cute.Tensor:
    """The ring of x as the B operand, (MMA, 1, MMAs of a unit, unit)."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
    shape = (plan.config.tile_rows, DEPTH, UNITS * plan.stages)
    ring = shared(pointer, cute.tile_to_shape(atom, shape, (0, 1, 2)))
    mma = make_mma(plan)
    return mma.make_fragment_B(mma.get_slice(0).partition_B(ring))


class Math:
    """D = W x^T, and the output that it becomes."""

    def __init__(self, plan: MixedPlan) -> None:
        self.plan = plan
        self.role = plan.roles["math"]

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warps."""
        plan, pipes = self.plan, scope.pipes
        team = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // hw.WARPGROUP_WARPS
        tiles, state = consumer_state(TILE_STAGES), consumer_state(plan.stages)
        mma, parts = make_mma(plan), plan.config.parts
        shape = mma.partition_shape_C((ROWS, plan.config.tile_rows))
        sums = [cute.make_rmem_tensor(shape, Float32) for _ in range(parts)]
        going = Int32(1)
        while going > 0:
            pipes.tile_math.wait(tiles)
            tile = read_tile(scope, tiles.index)
            pipes.tile_math.release(tiles.index)
            tiles.advance()
            going = tile.valid
            if going > 0:
                for part in cutlass.range_constexpr(parts):
                    sums[part].fill(0.0)
                state = self.multiply(scope, team, sums, state)
                store(plan, scope, tile, team, sums)

    @cute.jit
    def multiply(
        self, scope: Scope, team: Int32, sums: list[cute.Tensor], state: PipelineState
    ) -> PipelineState:
        """All of K; returns the state behind it."""
        plan = self.plan
        mma = make_mma(plan)
        shape = mma.partition_shape_A((ROWS, DEPTH))
        weights = [
            [cute.make_rmem_tensor(shape, BFloat16) for _ in range(plan.config.parts)]
            for _ in range(UNITS)
        ]
        x = x_operand(plan, scope.buffers.x)
        before = state.index
        for step in cutlass.range(scope.sizes.units // UNITS, unroll=1):
            self.wait(scope, state)
            for unit in cutlass.range_constexpr(UNITS):
                warpgroup.wait_group(UNITS - 1)
                if cutlass.const_expr(unit == UNITS - 1):
                    self.release(scope, before, step > 0)
                    before = state.index
                self.make_weights(scope, team, state.index, unit, weights[unit])
                place = state.index * UNITS + unit
                self.issue(sums, weights[unit], x[None, None, None, place])
            state.advance()
        warpgroup.wait_group(0)
        self.release(scope, before, scope.sizes.units >= UNITS)
        if scope.sizes.units % UNITS > 0:
            self.wait(scope, state)
            self.make_weights(scope, team, state.index, 0, weights[0])
            self.issue(sums, weights[0], x[None, None, None, state.index * UNITS])
            warpgroup.wait_group(0)
            self.release(scope, state.index, Boolean(True))
            state.advance()
        return state

    @cute.jit
    def wait(self, scope: Scope, state: PipelineState) -> None:
        """Until the stage of `state` is full."""
        scope.pipes.ab.wait(state)
        if cutlass.const_expr(self.plan.config.gather):
            scope.pipes.x.wait(state)

    @cute.jit
    def release(self, scope: Scope, stage: Int32, condition: Boolean) -> None:
        """The warp is done with a stage, where the condition holds."""
        scope.pipes.ab.release_where(stage, condition)
        if cutlass.const_expr(self.plan.config.gather):
            scope.pipes.x.release_where(stage, condition)

    @cute.jit
    def issue(self, sums: list[cute.Tensor], weights: list[cute.Tensor], x: cute.Tensor) -> None:
        """Issue the products of a unit of K as one group. x: (MMA, 1, MMAs of a unit)."""
        warpgroup.fence()
        for block in cutlass.range_constexpr(WORDS):
            for part in cutlass.range_constexpr(self.plan.config.parts):
                mma = make_mma(self.plan)
                mma.set(warpgroup.Field.ACCUMULATE, True)
                a, b = weights[part][None, None, block], x[None, None, block]
                cute.gemm(mma, sums[part], a, b, sums[part])
        warpgroup.commit_group()

    @cute.jit
    def make_weights(
        self,
        scope: Scope,
        team: Int32,
        stage: Int32,
        unit: cutlass.Constexpr,
        weights: list[cute.Tensor],
    ) -> None:
        """bf16 of a unit of the warpgroup's rows."""
        plan = self.plan
        thread, _, _ = cute.arch.thread_idx()
        elements, scales = own_places(plan.config, thread % THREADS)
        first = scope.buffers.w.toint() + stage * plan.w_bytes
        for part in cutlass.range_constexpr(plan.config.parts):
            tall = team * plan.config.parts + part
            start = first + (tall * UNITS + unit) * plan.unit_bytes
            factors = factors_of(plan.config, start + scales)
            words = load(start + elements, Uint32, WORDS)
            dequantise(words, factors, cute.recast_tensor(weights[part], Uint32))
