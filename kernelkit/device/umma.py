"""Issuing tcgen05.mma: operands in swizzled shared memory, accumulators in TMEM (device code)."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import tcgen05


def shared(pointer: cute.Pointer, layout: cute.ComposedLayout) -> cute.Tensor:
    """The buffer at `pointer` as TMA and the tensor core see it, swizzled as `layout` says."""
    return cute.make_tensor(
        cute.recast_ptr(pointer, layout.inner, dtype=pointer.value_type), layout.outer
    )


def accumulator(
    mma: cute.TiledMma, tile: tuple[int, int, int], base: cute.Pointer, column: Int32
) -> cute.Tensor:
    """The fp32 accumulator (MMA, 1, 1) of `tile` that starts at TMEM column `column`."""
    fragment = mma.make_fragment_C(mma.partition_shape_C(tile[:2]))
    return cute.make_tensor(base + column, fragment.layout)


@cute.jit
def issue(
    mma: cute.TiledMma,
    d: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    accumulate: Boolean,
    k_blocks: cutlass.Constexpr = None,
) -> None:
    """Issue D = A B, or D += A B, k block by k block; a commit announces the end of it.

    k_blocks: which, all of them by default.
    """
    if cutlass.const_expr(k_blocks is None):
        k_blocks = range(cute.size(b, mode=[2]))
    for k_block in k_blocks:
        mma.set(tcgen05.Field.ACCUMULATE, accumulate if k_block == k_blocks[0] else True)
        cute.gemm(mma, d, a[None, None, k_block], b[None, None, k_block], d)
