"""MMA role: one warp brings the scale factors of a stage to tensor memory and issues its MMAs.

Both are done in the order in which they are issued, so one place in tensor memory serves the scale
factors of all stages.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.utils import blackwell_helpers as sm100

from kernelkit import tmem
from kernelkit.block_scale import copy_atom
from kernelkit.pipelines import cta_group, draining, filling
from kernelkit.umma import accumulator, shared
from moe.formats import SCALE_ATOM_BYTES, SCALE_COLUMNS
from moe.sm100.args import Scope
from moe.sm100.plan import (
    ACC_STAGES,
    K_BLOCKS,
    ROLES,
    TILE_M,
    TILE_STAGES,
    GroupedPlan,
)
from moe.sm100.roles.scheduler import told
from moe.sm100.signature import ELEMENTS, SCALES

BYTES_OF_COLUMN = 4  # scale factors of a row in a column of tensor memory


class Mma:
    """Owns the tensor core."""

    def __init__(self, plan: GroupedPlan) -> None:
        self.plan = plan
        self.role = ROLES["mma"]

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warp."""
        plan, pipes = self.plan, scope.pipes
        tiles, acc = draining(TILE_STAGES), filling(ACC_STAGES)
        state = draining(plan.stages)
        blocks = -(-scope.sizes.k // plan.k_block)
        k_stages = -(-blocks // K_BLOCKS)
        going = Int32(1)
        while going > 0:
            pipes.tile_mma.wait(tiles)
            going = told(scope, tiles.index).valid
            pipes.tile_mma.release(tiles.index)
            tiles.advance()
            if going > 0:
                pipes.acc.wait_free(acc)
                tmem.order_after_wait()
                for step in cutlass.range(k_stages, unroll=1):
                    pipes.ab.wait(state)
                    left = blocks - step * K_BLOCKS
                    stages = (state.index, acc.index)
                    for count in cutlass.range_constexpr(1, K_BLOCKS):
                        if left == count:
                            self.add(scope, stages, step, count)
                    if left >= K_BLOCKS:
                        self.add(scope, stages, step, K_BLOCKS)
                    pipes.ab.release(state.index)
                    state.advance()
                pipes.acc.signal(acc.index)
                acc.advance()

    @cute.jit
    def add(self, scope: Scope, stages: tuple, step: Int32, count: cutlass.Constexpr) -> None:
        """D (+)= A B over a stage: count MMAs, to the end of K. stages: (ring, accumulator)."""
        plan, buffers, (stage, acc) = self.plan, scope.buffers, stages
        mma, tile = make_mma(plan), (TILE_M, plan.config.tile_n, plan.k_stage)
        self.bring_scales(scope, stage)
        d = accumulator(mma, tile, buffers.tmem, acc * plan.config.tile_n)
        a = mma.make_fragment_A(
            shared(
                buffers.a, sm100.make_smem_layout_a(mma, tile, buffers.a.value_type, plan.stages)
            )
        )[None, None, None, stage]
        b = mma.make_fragment_B(
            shared(
                buffers.b, sm100.make_smem_layout_b(mma, tile, buffers.b.value_type, plan.stages)
            )
        )[None, None, None, stage]
        for block in cutlass.range_constexpr(count):
            mma.set(tcgen05.Field.ACCUMULATE, step > 0 if block == 0 else True)
            mma.set(tcgen05.Field.SFA, self.scales(scope, "sfa", 1, block))
            mma.set(tcgen05.Field.SFB, self.scales(scope, "sfb", plan.b_blocks, block))
            cute.gemm(mma, d, a[None, None, block], b[None, None, block], d)

    @cute.jit
    def bring_scales(self, scope: Scope, stage: Int32) -> None:
        """Atoms of tensor memory: along K first, inside of that the blocks of 128 rows."""
        plan, buffers, group = self.plan, scope.buffers, cta_group(self.plan.edges)
        for atom in cutlass.range_constexpr(plan.atoms):
            column = plan.tmem["sfa"].begin + atom * SCALE_COLUMNS
            source = buffers.sfa + (stage * plan.atoms + atom) * (SCALE_ATOM_BYTES // 2)
            copy_atom(group, buffers.tmem + column, source)
            for block in cutlass.range_constexpr(plan.b_blocks):
                index = atom * plan.b_blocks + block
                column = plan.tmem["sfb"].begin + index * SCALE_COLUMNS
                place = (stage * plan.b_blocks + block) * plan.atoms + atom
                source = buffers.sfb + place * (SCALE_ATOM_BYTES // 2)
                copy_atom(group, buffers.tmem + column, source)

    @cute.jit
    def scales(
        self, scope: Scope, name: str, row_blocks: cutlass.Constexpr, block: cutlass.Constexpr
    ) -> cute.Pointer:
        """Where an MMA finds its scale factors of A or B: the byte of the first one."""
        plan = self.plan
        atom, byte = divmod(block * plan.scales_of_block, BYTES_OF_COLUMN)
        element = SCALES[plan.config.format.scale]
        start = cute.recast_ptr(scope.buffers.tmem + plan.tmem[name].begin, dtype=element)
        return start + (atom * row_blocks * SCALE_COLUMNS * BYTES_OF_COLUMN + byte)


def make_mma(plan: GroupedPlan) -> cute.TiledMma:
    """Built anew wherever it is used: passed through a loop it stops being a constant."""
    form = plan.config.format
    element, scale = ELEMENTS[form.element], SCALES[form.scale]
    return sm100.make_blockscaled_trivial_tiled_mma(
        element,
        element,
        OperandMajorMode.K,
        OperandMajorMode.K,
        scale,
        form.block,
        cta_group(plan.edges),
        (TILE_M, plan.config.tile_n),
    )
