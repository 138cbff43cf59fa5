"""MMA role: one warp copies the scale factors of a stage to tensor memory and issues its MMAs.

Copies and MMAs execute in the order of issue, so one range of tensor memory serves the scale
factors of all stages.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.utils import blackwell_helpers as sm100

from kernelkit.device import tmem
from kernelkit.device.pipelines import consumer_state, cta_group, producer_state
from kernelkit.device.umma import accumulator, copy_atom, shared
from moe.formats import SCALE_ATOM_BYTES, SCALE_COLUMNS
from moe.sm100.args import ELEMENTS, SCALES, Scope
from moe.sm100.plan import K_BLOCKS, ROLES, TILE_STAGES, GroupedPlan
from moe.sm100.roles.load import group_of
from moe.sm100.roles.scheduler import take_tile

BYTES_OF_COLUMN = 4  # scale factors of a row in a column of tensor memory


@dataclass(frozen=True)
class Stage:
    """Stage `step` of a tile."""

    step: Int32
    index: Int32  # stage of the ring
    group: Int32  # stage of the ring of scale factors
    column: Int32  # first column of D in tensor memory
    quarter: Int32  # quarter of a 128-row block where x's scale factors begin


class Mma:
    """Issues all MMAs."""

    def __init__(self, plan: GroupedPlan) -> None:
        self.plan = plan
        self.role = ROLES["mma"]

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warp."""
        plan, pipes = self.plan, scope.pipes
        tiles, acc = consumer_state(TILE_STAGES), producer_state(plan.acc_stages)
        state = consumer_state(plan.stages)
        half, group = Int32(0), Int32(-1)  # stage of the accumulators; group of scale factors
        blocks = -(-scope.sizes.k // plan.k_block)
        k_stages = -(-blocks // K_BLOCKS)
        going = Int32(1)
        while going > 0:
            tile = take_tile(scope, pipes.tile_mma, tiles)
            going = tile.valid
            tiles.advance()
            if going > 0:
                pipes.acc.wait_free(acc)
                tmem.order_after_wait()
                for step in cutlass.range(k_stages, unroll=1):
                    pipes.ab.wait(state)
                    left = blocks - step * K_BLOCKS
                    group = group_of(plan, group, step)
                    place = Stage(step, state.index, group, half * plan.second, tile.quarter)
                    for count in plan.tails:
                        if left == count:
                            self.add(scope, place, count)
                    if left >= K_BLOCKS:
                        self.add(scope, place, K_BLOCKS)
                    pipes.ab.release(state.index)
                    state.advance()
                pipes.acc.signal(acc.index)
                acc.advance()
                half = 1 - half

    @cute.jit
    def add(self, scope: Scope, place: Stage, count: cutlass.Constexpr) -> None:
        """Compute D (+)= A B over a stage of the ring: `count` MMAs, to the end of K. In a window
        of w, these are the last ones."""
        plan, buffers, stage = self.plan, scope.buffers, place.index
        mma, tile = make_mma(plan), (plan.m, plan.n, plan.k_stage)
        self.bring_scales(scope, place)
        # -> (MMA, MMA_M, MMA_N)
        d = accumulator(mma, tile, buffers.tmem, place.column)
        rows, columns = (buffers.x, buffers.w)[:: -1 if plan.config.swapped else 1]
        layout = sm100.make_smem_layout_a(mma, tile, rows.value_type, plan.stages)
        # -> (MMA, MMA_M, MMA_K)
        a = mma.make_fragment_A(shared(rows, layout))[None, None, None, stage]
        layout = sm100.make_smem_layout_b(mma, tile, columns.value_type, plan.stages)
        # -> (MMA, MMA_N, MMA_K)
        b = mma.make_fragment_B(shared(columns, layout))[None, None, None, stage]
        for block in cutlass.range_constexpr(count):
            x_scales = self.scales(scope, "x_scales", 1, block)
            w_scales = self.scales(scope, "w_scales", plan.w_blocks, block)
            sfa, sfb = x_scales, w_scales
            if cutlass.const_expr(plan.config.swapped):
                sfa, sfb = w_scales, x_scales + place.quarter * BYTES_OF_COLUMN
            mma.set(tcgen05.Field.ACCUMULATE, place.step > 0 if block == 0 else True)
            mma.set(tcgen05.Field.SFA, sfa)
            mma.set(tcgen05.Field.SFB, sfb)
            in_x, in_w = block, block + (K_BLOCKS - count) * plan.pads_w
            in_a, in_b = (in_w, in_x) if plan.config.swapped else (in_x, in_w)
            cute.gemm(mma, d, a[None, None, in_a], b[None, None, in_b], d)

    @cute.jit
    def bring_scales(self, scope: Scope, place: Stage) -> None:
        """Copy the atoms of a stage to tensor memory: along K first, then by blocks of 128 rows."""
        plan, buffers, group = self.plan, scope.buffers, cta_group(self.plan.edges)
        atoms, first = plan.group * plan.atoms, place.step % plan.group * plan.atoms
        for atom in cutlass.range_constexpr(plan.atoms):
            column = plan.tmem["x_scales"].begin + atom * SCALE_COLUMNS
            index = place.group * atoms + first + atom
            source = buffers.x_scales + index * (SCALE_ATOM_BYTES // 2)
            copy_atom(group, buffers.tmem + column, source)
            for block in cutlass.range_constexpr(plan.w_blocks):
                index = atom * plan.w_blocks + block
                column = plan.tmem["w_scales"].begin + index * SCALE_COLUMNS
                index = (place.group * plan.w_blocks + block) * atoms + first + atom
                source = buffers.w_scales + index * (SCALE_ATOM_BYTES // 2)
                copy_atom(group, buffers.tmem + column, source)

    @cute.jit
    def scales(
        self, scope: Scope, name: str, row_blocks: cutlass.Constexpr, block: cutlass.Constexpr
    ) -> cute.Pointer:
        """Return the address of the first scale factor of an MMA."""
        plan = self.plan
        atom, byte = divmod(block * plan.scales_of_block, BYTES_OF_COLUMN)
        element = SCALES[plan.config.format.scale]
        start = cute.recast_ptr(scope.buffers.tmem + plan.tmem[name].begin, dtype=element)
        return start + (atom * row_blocks * SCALE_COLUMNS * BYTES_OF_COLUMN + byte)


def make_mma(plan: GroupedPlan) -> cute.TiledMma:
    """Build the MMA. It is rebuilt at each use: passed through a loop it stops being a constant."""
    config, form = plan.config, plan.config.format
    x, w, scale = ELEMENTS[config.x_format.element], ELEMENTS[form.element], SCALES[form.scale]
    return sm100.make_blockscaled_trivial_tiled_mma(
        *((w, x) if config.swapped else (x, w)),
        OperandMajorMode.K,
        OperandMajorMode.K,
        scale,
        form.block,
        cta_group(plan.edges),
        (plan.m, plan.n),
    )
