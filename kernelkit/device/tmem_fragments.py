"""Fragments of a warp's MMAs in tensor memory (device code).

A warp reaches 32 lanes of tensor memory; half of them, 16 rows, are what an MMA of 16 rows has in
registers. Thread 4 g + t has of an A operand in 16 bits, 16 columns of K at a time, four words of
two neighbours along K: row g and row g + 8 at 2 t, then both at 2 t + 8 (tcgen05.st.16x128b). Of an
accumulator in fp32, eight columns at a time, it has columns 2 t and 2 t + 1 of row g, then of row
g + 8 (tcgen05.ld.16x256b). So what a warp or warpgroup has for mma.sync or wgmma goes to tensor
memory as it is, and a sum comes back as these would leave it.

Source: PTX ISA, "Data Movement Shape" of tcgen05, and the fragments of mma.m16n8k16.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernelkit.device.shared_words import operands
from kernelkit.device.tmem import LANE_STRIDE
from kernelkit.plan import hw

LANES = 16  # of a fragment
A_WORDS, SUM_WORDS = 2, 4  # of a thread in four columns of tensor memory, and in eight


@cute.jit
def fragment_at(base: cute.Pointer, column: Int32, half: Int32) -> Int32:
    """The address of a fragment at `column` of the allocation, in the lanes of this warp: of their
    first half (0) or of the second one (1)."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % hw.WARPGROUP_WARPS
    lane = warp * hw.WARP_THREADS + half * LANES
    return base.toint() + column + lane * LANE_STRIDE


@cute.jit
def store_a(words: cute.Tensor, address: Int32) -> None:
    """Start tcgen05.st of an A operand: Uint32 (N,), four words for each 16 of K, which take eight
    columns. Another warp or the tensor core may read it after tcgen05.wait::st and a signal."""
    count = cutlass.const_expr(cute.size(words))
    _, names = operands("r", 1, count)
    cute.arch.inline_ptx(
        f"tcgen05.st.sync.aligned.16x128b.x{count // A_WORDS}.b32 [{{$r0}}], {names};",
        read_only_args=[address, *(words[index] for index in range(count))],
    )


@cute.jit
def load_sums(address: Int32, columns: cutlass.Constexpr) -> cute.Tensor:
    """fp32 (columns / 2,): four of a thread for each eight columns of an accumulator. They are
    there: the load and tcgen05.wait::ld are one piece of PTX, so that no use comes between."""
    count = columns // 2
    _, names = operands("w", 0, count)
    found = cute.arch.inline_ptx(
        f"tcgen05.ld.sync.aligned.16x256b.x{count // SUM_WORDS}.b32 {names}, [{{$r0}}]; "
        "tcgen05.wait::ld.sync.aligned;",
        write_only_types=[Float32] * count,
        read_only_args=[address],
    )
    sums = cute.make_rmem_tensor(count, Float32)
    for index in cutlass.range_constexpr(count):
        sums[index] = found[index]
    return sums
