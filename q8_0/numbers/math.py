"""Products of the rows of a warpgroup with the tokens of a tile (device code).

While the tensor core works on one unit of K, whose weights it reads in registers, the next unit is
converted in others.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.pipeline import PipelineState
from cutlass.utils import hopper_helpers as sm90

from kernelkit.device.pipelines import consumer_state, consumer_state_at
from kernelkit.device.umma import shared
from kernelkit.plan import hw
from q8_0.numbers.config import STEP_UNITS, TEAM_ROWS, UNIT
from q8_0.numbers.plan import NumbersPlan
from q8_0.numbers.scope import TYPES, Scope, item_of
from q8_0.numbers.store import Store
from q8_0.numbers.weights import GROUPS, Weights

K = OperandMajorMode.K


def make_mma(plan: NumbersPlan) -> cute.TiledMma:
    """64 rows of weights from registers, tokens K-major from shared memory."""
    element, tile = TYPES[plan.config.dtype], (TEAM_ROWS, plan.config.tile_tokens)
    source = warpgroup.OperandSource.RMEM
    return sm90.make_trivial_tiled_mma(element, element, K, K, Float32, (1, 1, 1), tile, source)


def x_operand(plan: NumbersPlan, pointer: cute.Pointer) -> cute.Tensor:
    """The ring of tokens as the B operand, (MMA, 1, MMAs of a unit, stage)."""
    element = TYPES[plan.config.dtype]
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, element)
    shape = (plan.config.tile_tokens, UNIT, plan.stages[0])
    ring = shared(pointer, cute.tile_to_shape(atom, shape, (0, 1, 2)))
    mma = make_mma(plan)
    return mma.make_fragment_B(mma.get_slice(0).partition_B(ring))


class Math:
    """Computes sums W x^T, and stores them."""

    def __init__(self, plan: NumbersPlan) -> None:
        self.plan = plan
        self.role = plan.roles["math"]
        self.weights, self.epilogue = Weights(plan), Store(plan)

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warps."""
        plan = self.plan
        team = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // hw.WARPGROUP_WARPS
        state, w_state = consumer_state(plan.stages[0]), consumer_state(plan.stages[1])
        filling = Int32(0)
        shape = make_mma(plan).partition_shape_C((TEAM_ROWS, plan.config.tile_tokens))
        sums = cute.make_rmem_tensor(shape, Float32)
        for number in cutlass.range(scope.cluster, scope.items, scope.clusters, unroll=1):
            item = item_of(plan, scope, number)
            sums.fill(0.0)
            state, w_state = self.multiply(scope, sums, state, w_state, filling)
            filling += scope.share.stages
            if cutlass.const_expr(plan.config.split == 1):
                self.epilogue.store(scope, item, Int32(scope.params.tokens), team, sums)
        if cutlass.const_expr(plan.config.split > 1):
            item = item_of(plan, scope, scope.cluster)
            self.epilogue.store_shared(scope, item, team, sums)

    @cute.jit
    def multiply(
        self,
        scope: Scope,
        sums: cute.Tensor,
        state: PipelineState,
        w_state: PipelineState,
        filling: Int32,
    ) -> tuple[PipelineState, PipelineState]:
        """Multiply all of the CTA's K; return the states after it.

        Args:
            scope: context
            sums: accumulators
            state: of tokens
            w_state: of weights, if a stage is a step
            filling: stages of weights before this tile
        """
        plan, steps = self.plan, scope.share.steps
        of_stage = plan.config.stage_steps
        shape = make_mma(plan).partition_shape_A((TEAM_ROWS, UNIT))
        element = TYPES[plan.config.dtype]
        weights = [cute.make_rmem_tensor(shape, element) for _ in range(STEP_UNITS)]
        x, places = x_operand(plan, scope.x_buffer), self.weights.places(scope)
        held = [state.index, state.index]  # stages of the two previous units
        for step in cutlass.range(steps, unroll=1):
            # All waits come first: a wait between a product in flight and the registers of the next
            # one's weights is a branch, and ptxas would serialise the products (C7513).
            stage = w_state.index
            if cutlass.const_expr(of_stage == 1):
                self.wait_weights(scope, w_state)
                w_state.advance()
            else:
                own = consumer_state_at(plan.stages[1], filling + step // of_stage)
                stage = own.index
                if step % of_stage == 0:
                    self.wait_weights(scope, own)
            stages = []
            for _ in cutlass.range_constexpr(STEP_UNITS):
                scope.pipes.x.wait(state)
                stages.append(state.index)
                state.advance()
            here = self.weights.places_of(places, stage, step % of_stage)
            for unit in cutlass.range_constexpr(STEP_UNITS):
                warpgroup.wait_group(STEP_UNITS - 1)
                scope.pipes.x.release_where(held[unit], step > 0)
                held[unit] = stages[unit]
                self.weights.make(here, unit, cute.recast_tensor(weights[unit], Uint32))
                if cutlass.const_expr(unit + 1 == STEP_UNITS):
                    last = (step % of_stage == of_stage - 1) | (step + 1 == steps)
                    self.release_weights(scope, stage, last)
                self.issue(sums, weights[unit], x[None, None, None, stages[unit]])
        warpgroup.wait_group(0)
        for unit in cutlass.range_constexpr(STEP_UNITS):
            scope.pipes.x.release_where(held[unit], steps > 0)
        return state, w_state

    @cute.jit
    def issue(self, sums: cute.Tensor, weights: cute.Tensor, x: cute.Tensor) -> None:
        """Issue the products of a unit as one group. x: (MMA, 1, MMAs of a unit)."""
        warpgroup.fence()
        for group in cutlass.range_constexpr(GROUPS):
            mma = make_mma(self.plan)
            mma.set(warpgroup.Field.ACCUMULATE, True)
            cute.gemm(mma, sums, weights[None, None, group], x[None, None, group], sums)
        warpgroup.commit_group()

    @cute.jit
    def wait_weights(self, scope: Scope, state: PipelineState) -> None:
        """Wait until a stage of weights is full."""
        if cutlass.const_expr(self.plan.edges.has("w")):
            scope.pipes.w.wait(state)
        if cutlass.const_expr(self.plan.edges.has("copied")):
            scope.pipes.copied.wait(state)

    @cute.jit
    def release_weights(self, scope: Scope, stage: Int32, condition: Boolean) -> None:
        """Release a stage of weights, once all lanes have read it, if the condition holds."""
        cute.arch.sync_warp()
        if cutlass.const_expr(self.plan.edges.has("w")):
            scope.pipes.w.release_where(stage, condition)
        if cutlass.const_expr(self.plan.edges.has("copied")):
            scope.pipes.copied.release_where(stage, condition)
