"""The attention forward kernel for Blackwell: host entry, prologue, dispatch of the warps.

Read `fmha/plan.py` first (who, where, who waits for whom), then this file, then `roles/` in
data-flow order: load, mma, softmax, correction, epilogue.

One CTA per 128 query rows of one head; grid = (query tiles, query heads, batch).
"""

import math

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.memory import SmemAllocator

from fmha.config import AttentionConfig
from fmha.plan import make_plan
from fmha.sm100.args import Buffers, Outputs, Pipes, TmaLoad, Work
from fmha.sm100.products import (
    IO_TYPES,
    make_pv_mma,
    make_qk_mma,
    pv_tile,
    qk_tile,
    smem_layouts,
)
from fmha.sm100.roles.load import Load
from fmha.sm100.roles.mma import Mma
from fmha.sm100.roles.softmax import Softmax
from kernelkit import hw
from kernelkit.pipelines import make_pipelines

LOG2_E = math.log2(math.e)
TOKENS_FIRST = (1, 3, 2, 0)  # [B, S, H, D] seen as (S, D, H, B)
DIMS_FIRST = (3, 1, 2, 0)  # ... as (D, S, H, B)
FREE_BARRIER = 1  # named barrier of the softmax warps; 0 is the CTA's


class AttentionForward:
    """One config, traced by `cute.compile(AttentionForward(config), ...)`."""

    def __init__(self, config: AttentionConfig) -> None:
        self.plan = make_plan(config)
        self.io = IO_TYPES[config.dtype]
        self.load, self.mma, self.softmax = Load(self.plan), Mma(self.plan), Softmax(self.plan)

    @cute.jit
    def __call__(
        self,
        tensors: tuple[cute.Tensor, ...],
        statistics: tuple[cute.Tensor | None, ...],
        kv_lens: cute.Tensor | None,
        scale: Float32,
        stream: CUstream,
    ) -> None:
        """Describe the copies and launch.

        tensors: q, o [B, Sq, Hq, D]; k, v [B, Skv, Hkv, D], last dim contiguous, other strides
        multiples of 16 bytes. statistics: lse [B, Hq, Sq], and row_max or None. kv_lens: [B]
        int32 or None. scale multiplies q.k, > 0. Order of tensors: q, k, v, o.
        """
        q, k, v, o = tensors
        lse, row_max = statistics
        loads = self.describe_loads(q, k, v)
        outputs = Outputs(
            reorder(o, TOKENS_FIRST),
            reorder(lse, (2, 1, 0)),
            reorder(row_max, (2, 1, 0)) if cutlass.const_expr(row_max is not None) else None,
            kv_lens,
        )
        batch, q_length, heads, _ = q.shape
        self.kernel(*loads, outputs, scale * LOG2_E).launch(
            grid=(cute.ceil_div(q_length, self.plan.config.tile_m), heads, batch),
            block=(self.plan.roles.threads, 1, 1),
            stream=stream,
        )

    @cute.jit
    def describe_loads(self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor) -> tuple:
        """TMA descriptions of Q, K and V tiles, which carry shapes and strides of this launch."""
        qk_mma, pv_mma = make_qk_mma(self.plan), make_pv_mma(self.plan)
        operation = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
        layouts = smem_layouts(self.plan)
        kinds = (
            (cute.nvgpu.make_tiled_tma_atom_A, q, TOKENS_FIRST, qk_tile(self.plan), qk_mma),
            (cute.nvgpu.make_tiled_tma_atom_B, k, TOKENS_FIRST, qk_tile(self.plan), qk_mma),
            (cute.nvgpu.make_tiled_tma_atom_B, v, DIMS_FIRST, pv_tile(self.plan), pv_mma),
        )
        loads = []
        for layout, (make_atom, tensor, order, tile, mma) in zip(layouts, kinds, strict=True):
            one_stage = cute.select(layout, mode=[0, 1, 2])
            atom, coordinates = make_atom(operation, reorder(tensor, order), one_stage, tile, mma)
            loads.append(TmaLoad(atom, coordinates, layout))
        return tuple(loads)

    @cute.kernel
    def kernel(
        self, q: TmaLoad, k: TmaLoad, v: TmaLoad, outputs: Outputs, scale_log2: Float32
    ) -> None:
        """Prologue for all warps, then each warp plays its role."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        work = self.locate(k, outputs, scale_log2)

        # Allocate, in the order of the plan.
        smem = SmemAllocator()
        barriers = smem.allocate_array(
            Int64, self.plan.edges.barrier_bytes // hw.MBARRIER_BYTES, byte_alignment=8
        )
        tmem_base = smem.allocate(Int32, byte_alignment=4)
        sQ, sK, sV = [
            smem.allocate_tensor(self.io, load.layout.outer, 1024, swizzle=load.layout.inner)
            for load in (q, k, v)
        ]
        if warp == self.softmax.role.first_warp:
            cute.arch.alloc_tmem(self.plan.tmem.allocated, tmem_base)
            cute.arch.relinquish_tmem_alloc_permit()

        # Pipelines.
        pipes = Pipes(**make_pipelines(self.plan.edges, barriers))
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        tmem_pointer = cute.arch.retrieve_tmem_ptr(Float32, 16, tmem_base)
        buffers = Buffers(sQ, sK, sV, tmem_pointer)

        # Dispatch.
        if warp == self.load.role.first_warp:
            self.load.run(q, k, v, work, buffers, pipes)
        elif warp == self.mma.role.first_warp:
            self.mma.run(work, buffers, pipes)
        else:
            self.softmax.run(work, buffers, pipes, outputs)
            # The last O has been waited for, so no MMA is in flight; all rows have been read.
            cute.arch.barrier(barrier_id=FREE_BARRIER, number_of_threads=self.softmax.role.threads)
            if warp == self.softmax.role.first_warp:
                cute.arch.dealloc_tmem(tmem_pointer, self.plan.tmem.allocated)

    @cute.jit
    def locate(self, k: TmaLoad, outputs: Outputs, scale_log2: Float32) -> Work:
        """This CTA's tile, and which key tiles it has to walk: loop bounds before masks."""
        tile_m, tile_n = self.plan.config.tile_m, self.plan.config.tile_n
        q_tile, head, batch = cute.arch.block_idx()
        q_length, q_heads = cute.size(outputs.o, mode=[0]), cute.size(outputs.o, mode=[2])
        kv_length, kv_heads = cute.size(k.tensor, mode=[0]), cute.size(k.tensor, mode=[2])
        if cutlass.const_expr(outputs.kv_lens is not None):
            kv_length = cutlass.max(cutlass.min(outputs.kv_lens[batch], kv_length), 0)
        seen_by_any, seen_by_all = kv_length, kv_length
        if cutlass.const_expr(self.plan.config.mask == "causal"):
            # Long rows first: the last CTAs to start are then the short ones.
            tiles, _, _ = cute.arch.grid_dim()
            q_tile = tiles - 1 - q_tile
            first_row = q_tile * tile_m
            last_row = cutlass.min(first_row + tile_m, q_length) - 1
            offset = kv_length - q_length
            seen_by_any = cutlass.max(cutlass.min(offset + last_row + 1, kv_length), 0)
            seen_by_all = cutlass.max(cutlass.min(offset + first_row + 1, kv_length), 0)
        kv_tiles = cute.ceil_div(seen_by_any, tile_n)
        return Work(
            q_tile=q_tile,
            head=head,
            kv_head=head // (q_heads // kv_heads),
            batch=batch,
            q_length=q_length,
            kv_length=kv_length,
            kv_tiles=kv_tiles,
            masked_tiles=kv_tiles - seen_by_all // tile_n,
            scale_log2=scale_log2,
        )


@cute.jit
def reorder(tensor: cute.Tensor, modes: cutlass.Constexpr) -> cute.Tensor:
    """The same memory with its modes in another order."""
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=list(modes)))
