"""A minimal sparse GEMM of the CuTe DSL for sm_100a: one CTA, one tile of D.

D (128, N) = A B^T, of f16 or fp8. Two of four neighbouring elements of A are stored, so that a row
has 128 bytes. The CTA's threads copy A, B and the metadata; the DSL determines the layouts, the
descriptors and which metadata each MMA reads.
"""

import cutlass
import torch
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.cute.nvgpu.warp.mma import SparseMetadataFormat
from cutlass.cute.runtime import from_dlpack
from cutlass.memory import SmemAllocator
from cutlass.utils import blackwell_helpers

import ptxemu

M, N = 128, 64
_ROW_BYTES = 128  # of the stored part of A: the width of the swizzle's pattern
_CHUNK = 16  # bytes that the swizzle moves
_COLUMNS = 128  # of tensor memory: D, followed by the metadata
_OPS = {
    cutlass.Float16: tcgen05.MmaF16BF16SparseOp,
    cutlass.Float8E4M3FN: tcgen05.MmaFP8SparseOp,
    cutlass.Float8E5M2: tcgen05.MmaFP8SparseOp,
}


class SparseGemm:
    """The kernel.

    kept: stored elements of a row of A.
    k: all of its elements.
    """

    def __init__(self, ab_type: type[cutlass.Numeric]) -> None:
        self.type = ab_type
        self.kept = 8 * _ROW_BYTES // ab_type.width
        self.k = 2 * self.kept

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, e: cute.Tensor, d: cute.Tensor) -> None:
        """Launch the kernel.

        a: (128, kept).
        b: (N, k).
        e: metadata, uint32 (128, k / 32), by lane.
        d: (128, N).
        """
        op = _OPS[self.type](
            self.type,
            cutlass.Float32,
            (M, N),
            tcgen05.CtaGroup.ONE,
            tcgen05.OperandSource.SMEM,
            OperandMajorMode.K,
            OperandMajorMode.K,
            SparseMetadataFormat.TID,
        )
        mma, tile = cute.make_tiled_mma(op), (M, N, self.k)
        a_layout = blackwell_helpers.make_sparse_smem_layout_a(mma, tile, self.type, 1)
        b_layout = blackwell_helpers.make_smem_layout_b(mma, tile, self.type, 1)
        self.kernel(a, b, e, d, mma, a_layout, b_layout).launch(grid=(1, 1, 1), block=(M, 1, 1))

    @cute.kernel
    def kernel(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        e: cute.Tensor,
        d: cute.Tensor,
        mma: cute.TiledMma,
        a_layout: cute.ComposedLayout,
        b_layout: cute.ComposedLayout,
    ) -> None:
        """Each thread has a row of A and of D."""
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator()
        barrier = smem.allocate_array(cutlass.Int64, 1)
        holder = smem.allocate_array(cutlass.Int32, 1)
        kept = smem.allocate_tensor(self.type, cute.make_layout(M * self.kept), 1024)
        s_b = smem.allocate_tensor(self.type, b_layout.outer, 1024, b_layout.inner)
        if warp == 0:
            cute.arch.alloc_tmem(_COLUMNS, holder)
            if thread == 0:
                cute.arch.mbarrier_init(barrier, 1)
        cute.arch.mbarrier_init_fence()
        chunk = 8 * _CHUNK // self.type.width
        for k in cutlass.range(self.kept, unroll=8):
            kept[thread * self.kept + (k ^ (thread % 8 * chunk))] = a[thread, k]
        step = self.k // cute.size(s_b, mode=[2])  # of one MMA
        if thread < N:
            for k in cutlass.range(self.k, unroll=8):
                s_b[(thread, k % step), 0, k // step, 0] = b[thread, k]
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()

        base = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, holder)
        total = mma.make_fragment_C(mma.partition_shape_C((M, N)))
        total = cute.make_tensor(base, total.layout)
        self.put_metadata(base + N, e)
        cute.arch.sync_threads()
        if warp == 0:
            a_type = blackwell_helpers.make_sparse_a_dtype(self.type)
            s_a = cute.recast_ptr(kept.iterator, a_layout.inner, a_type)
            of_a = mma.make_fragment_A(cute.make_tensor(s_a, a_layout.outer))
            of_b = mma.make_fragment_B(s_b)
            e_type = blackwell_helpers.make_sparse_e_dtype(self.type)
            e_layout = blackwell_helpers.make_sparse_tmem_layout_e(
                mma.partition_shape_A((M, self.k)), self.type
            )
            of_e = cute.make_tensor(cute.recast_ptr(base + N, dtype=e_type), e_layout)
            for k in cutlass.range_constexpr(self.k // step):
                metadata = of_e[None, None, k].iterator
                mma.set(tcgen05.Field.METADATA, cute.recast_ptr(metadata, dtype=cutlass.Uint8))
                mma.set(tcgen05.Field.ACCUMULATE, k > 0)
                where = (None, None, k, 0)
                cute.gemm(mma, total, of_a[where], of_b[where], total)
            with cute.arch.elect_one():
                tcgen05.commit(barrier)
        cute.arch.mbarrier_wait(barrier, 0)
        self.store(total[(None, None), 0, 0], d)
        cute.arch.sync_threads()
        if warp == 0:
            cute.arch.relinquish_tmem_alloc_permit()
            cute.arch.dealloc_tmem(base, _COLUMNS)

    @cute.jit
    def put_metadata(self, where: cute.Pointer, e: cute.Tensor) -> None:
        """Copy rows of words to lanes."""
        thread, _, _ = cute.arch.thread_idx()
        words = cute.make_tensor(
            cute.recast_ptr(where, dtype=cutlass.Uint32),
            cute.make_layout(e.shape, stride=(1 << 16, 1)),
        )
        op = tcgen05.St32x32bOp(tcgen05.Repetition(e.shape[1]))
        copy = tcgen05.make_tmem_copy(cute.make_copy_atom(op, cutlass.Uint32), words)
        part = copy.get_slice(thread)
        source = part.partition_S(e)
        registers = cute.make_rmem_tensor(source.shape, cutlass.Uint32)
        cute.autovec_copy(source, registers)
        cute.copy(copy, registers, part.partition_D(words))
        cute.arch.fence_view_async_tmem_store()

    @cute.jit
    def store(self, total: cute.Tensor, d: cute.Tensor) -> None:
        thread, _, _ = cute.arch.thread_idx()
        op = tcgen05.Ld32x32bOp(tcgen05.Repetition(N))
        copy = tcgen05.make_tmem_copy(cute.make_copy_atom(op, cutlass.Float32), total)
        part = copy.get_slice(thread)
        out = part.partition_D(d)
        registers = cute.make_rmem_tensor(out.shape, cutlass.Float32)
        cute.copy(copy, part.partition_S(total), registers)
        cute.arch.fence_view_async_tmem_load()
        cute.autovec_copy(registers, out)


def compiled(gemm: SparseGemm, tensors: list[torch.Tensor]) -> tuple[object, list[object]]:
    """Return the result of `cute.compile`, and its arguments: A, B (as bytes if fp8), E and D."""
    views = [from_dlpack(tensor, assumed_align=16) for tensor in tensors]
    for view in views[:2]:
        view.element_type = gemm.type
    views[2].element_type = cutlass.Uint32
    return ptxemu.compile(gemm, *views), views
