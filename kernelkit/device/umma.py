"""Issuing tcgen05.mma: operands in swizzled shared memory, accumulators and scale factors in TMEM
(device code).

Scale factors of block-scaled MMAs come from shared memory by atoms. An atom is 512 bytes: 128 rows
by four scale factors, row r's at byte r % 32 * 16 + r / 32 * 4. tcgen05.cp.32x128b.warpx4 brings it
to four columns, row r to lane r % 32 of column r / 32, in every quarter of the lanes, where MMAs
find it. Copies and MMAs of one thread execute in order.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
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


# Of a matrix descriptor: version 1, no swizzle, 8 rows of 16 bytes every 128 bytes. The next 16
# bytes of a row would be 16 further on; there are none, but CUTLASS's descriptors say the same.
_DESCRIPTOR = (1 << 46) | (128 >> 4 << 32) | (16 >> 4 << 16)


# Version 1, swizzle of 128 bytes, 8 rows every 1,024 bytes.
_SWIZZLED = (2 << 61) | (1 << 46) | (1024 >> 4 << 32) | (16 >> 4 << 16)
ROW_BYTES = 32  # that a copy brings to each lane, as much of a row as one MMA reads


@cute.jit
def copy_panel(column: cute.Pointer, source: cute.Pointer) -> None:
    """Start to copy 128 swizzled rows of 128 bytes to tensor memory, row r to lane r of 32 columns;
    by one elected thread, for the A operand of a single CTA."""
    start = source.toint()
    with cute.arch.elect_one():
        for part in cutlass.range_constexpr(128 // ROW_BYTES):
            place = Int64(start + part * ROW_BYTES >> 4 & 0x3FFF)
            cute.arch.inline_ptx(
                "tcgen05.cp.cta_group::1.128x256b [{$r0}], {$r1};",
                read_only_args=[
                    Int32(column.toint()) + part * (ROW_BYTES // 4),
                    place | Int64(_SWIZZLED),
                ],
            )


@cute.jit
def copy_atom(group: cutlass.Constexpr, column: cute.Pointer, source: cute.Pointer) -> None:
    """Start to copy an atom of shared memory to tensor memory, by one elected thread.

    group: CtaGroup; with TWO either CTA of the pair copies its own.
    """
    name = "cta_group::2" if group is tcgen05.CtaGroup.TWO else "cta_group::1"
    start = Int64(source.toint() >> 4 & 0x3FFF)
    with cute.arch.elect_one():
        cute.arch.inline_ptx(
            f"tcgen05.cp.{name}.32x128b.warpx4 [{{$r0}}], {{$r1}};",
            read_only_args=[Int32(column.toint()), start | Int64(_DESCRIPTOR)],
        )
