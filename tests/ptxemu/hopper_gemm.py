"""A small GEMM for Hopper in the CuTe DSL: C = A B^T by TMA, mbarriers and wgmma.

Warps 0 to 3 multiply, warp 4 loads. Every CTA has one tile of C; K is a multiple of a stage. The
fragments of C are stored straight to global memory.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import torch
from cutlass import pipeline
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.runtime import from_dlpack
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

import ptxemu

WARPGROUP = 128
THREADS = WARPGROUP + 32
STAGE_BYTES = 128  # of a row along K
ALIGNMENT = 1024


@dataclass(frozen=True)
class Operand:
    """A or B in global memory, as TMA sees it, and its stages in shared memory."""

    atom: cute.CopyAtom
    tensor: cute.Tensor
    stages: cute.ComposedLayout


class HopperGemm:
    """The kernel. tile: rows and columns of C of a CTA, a multiple of 64 and of 8."""

    def __init__(self, tile: tuple[int, int], stages: int) -> None:
        self.tile = tile
        self.stages = stages
        self.types: tuple[type[cutlass.Numeric], ...] = ()  # of A and B

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor) -> None:
        """a (M, K), b (N, K), c (M, N) fp32; a and b of one width, major in either mode."""
        self.types = a.element_type, b.element_type
        a_major, b_major = LayoutEnum.from_tensor(a), LayoutEnum.from_tensor(b)
        tiler = (*self.tile, 8 * STAGE_BYTES // a.element_type.width)
        mma = hopper_helpers.make_trivial_tiled_mma(
            a.element_type,
            b.element_type,
            a_major.sm90_mma_major_mode(),
            b_major.sm90_mma_major_mode(),
            cutlass.Float32,
            (1, 1, 1),
            (64, self.tile[1]),
        )
        a_stages = hopper_helpers.make_smem_layout_a(a_major, tiler, a.element_type, self.stages)
        b_stages = hopper_helpers.make_smem_layout_b(b_major, tiler, b.element_type, self.stages)
        load = cpasync.CopyBulkTensorTileG2SOp()
        a_atom, a_tma = cpasync.make_tiled_tma_atom(
            load, a, cute.slice_(a_stages, (None, None, 0)), (tiler[0], tiler[2])
        )
        b_atom, b_tma = cpasync.make_tiled_tma_atom(
            load, b, cute.slice_(b_stages, (None, None, 0)), (tiler[1], tiler[2])
        )
        grid = (cute.ceil_div(c.shape[0], tiler[0]), cute.ceil_div(c.shape[1], tiler[1]), 1)
        of_a, of_b = Operand(a_atom, a_tma, a_stages), Operand(b_atom, b_tma, b_stages)
        self.kernel(of_a, of_b, c, mma, tiler).launch(grid=grid, block=(THREADS, 1, 1))

    @cute.kernel
    def kernel(
        self,
        a: Operand,
        b: Operand,
        c: cute.Tensor,
        mma: cute.TiledMma,
        tiler: cutlass.Constexpr,
    ) -> None:
        """Grid (tiles along M, along N)."""
        row, column, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        smem = SmemAllocator()
        barriers = smem.allocate_array(cutlass.Int64, 2 * self.stages)
        s_a = smem.allocate_tensor(self.types[0], a.stages.outer, ALIGNMENT, a.stages.inner)
        s_b = smem.allocate_tensor(self.types[1], b.stages.outer, ALIGNMENT, b.stages.inner)
        ring = pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers,
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, WARPGROUP // 32),
            tx_count=cute.size_in_bytes(self.types[0], cute.select(a.stages, [0, 1]))
            + cute.size_in_bytes(self.types[1], cute.select(b.stages, [0, 1])),
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
        )
        g_a = cute.local_tile(a.tensor, (tiler[0], tiler[2]), (row, None))
        g_b = cute.local_tile(b.tensor, (tiler[1], tiler[2]), (column, None))
        one = cute.make_layout(1)
        a_to, a_from = cpasync.tma_partition(
            a.atom, 0, one, cute.group_modes(s_a, 0, 2), cute.group_modes(g_a, 0, 2)
        )
        b_to, b_from = cpasync.tma_partition(
            b.atom, 0, one, cute.group_modes(s_b, 0, 2), cute.group_modes(g_b, 0, 2)
        )
        steps = cute.size(g_a, mode=[2])
        if warp == WARPGROUP // 32:
            filled = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
            for step in cutlass.range(steps, unroll=1):
                ring.producer_acquire(filled)
                barrier = ring.producer_get_barrier(filled)
                cute.copy(a.atom, a_from[None, step], a_to[None, filled.index], tma_bar_ptr=barrier)
                cute.copy(b.atom, b_from[None, step], b_to[None, filled.index], tma_bar_ptr=barrier)
                ring.producer_commit(filled)
                filled.advance()
        else:
            self.multiply((s_a, s_b), c, mma, tiler, ring, steps)

    @cute.jit
    def multiply(
        self,
        tiles: tuple[cute.Tensor, cute.Tensor],
        c: cute.Tensor,
        mma: cute.TiledMma,
        tiler: cutlass.Constexpr,
        ring: pipeline.PipelineTmaAsync,
        steps: cutlass.Int32,
    ) -> None:
        """The warpgroup's part. One group of wgmma stays in flight while the next is issued."""
        thread, _, _ = cute.arch.thread_idx()
        row, column, _ = cute.arch.block_idx()
        part = mma.get_slice(thread)
        a = mma.make_fragment_A(part.partition_A(tiles[0]))
        b = mma.make_fragment_B(part.partition_B(tiles[1]))
        out = part.partition_C(cute.local_tile(c, (tiler[0], tiler[1]), (row, column)))
        total = cute.make_rmem_tensor(out.shape, cutlass.Float32)
        total.fill(0.0)
        read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        freed = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        mma.set(warpgroup.Field.ACCUMULATE, True)
        for step in cutlass.range(steps, unroll=1):
            ring.consumer_wait(read)
            warpgroup.fence()
            for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
                where = (None, None, k, read.index)
                cute.gemm(mma, total, a[where], b[where], total)
            warpgroup.commit_group()
            read.advance()
            if step > 0:
                warpgroup.wait_group(1)
                ring.consumer_release(freed)
                freed.advance()
        warpgroup.wait_group(0)
        cute.autovec_copy(total, out)


def compiled(gemm: HopperGemm, tensors: list[torch.Tensor], types: tuple[object, object]) -> object:
    """Compile for sm_90a; return the result of `cute.compile`, and its arguments A, B and C."""
    views = [from_dlpack(tensor, assumed_align=16) for tensor in tensors]
    for view, type_ in zip(views, types, strict=False):
        view.element_type = type_
    return ptxemu.compile(gemm, *views, options="--gpu-arch sm_90a"), views
