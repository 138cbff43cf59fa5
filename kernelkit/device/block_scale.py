"""Scale factors of block-scaled MMAs: from shared memory to tensor memory (device code).

An atom is 512 bytes: 128 rows by four scale factors, row r's at byte r % 32 * 16 + r / 32 * 4.
tcgen05.cp.32x128b.warpx4 brings it to four columns, row r to lane r % 32 of column r / 32, in every
quarter of the lanes, where MMAs find it. Copies and MMAs of one thread execute in order.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import tcgen05

# Of a matrix descriptor: version 1, no swizzle, 8 rows of 16 bytes every 128 bytes. The next 16
# bytes of a row would be 16 further on; there are none, but CUTLASS's descriptors say the same.
_DESCRIPTOR = (1 << 46) | (128 >> 4 << 32) | (16 >> 4 << 16)


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
