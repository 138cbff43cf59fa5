"""Rows and fragments of tensor memory in registers and back (device code).

An accumulator tile of 128 rows keeps row r in lane r and column n in TMEM column n (PTX ISA,
tcgen05 data path layout D). Warp w of a warpgroup reaches lanes 32 w .. 32 w + 31 only, so thread r
of the warpgroup owns row r, and a whole row needs no shuffle. In a CTA pair with 64 rows per CTA
(layout B) lanes r and 64 + r hold the two halves of row r; read "row r" below as "lane r" there.
Non-goals: M = 64 in one CTA, 16-bit accumulators.

Fragments of a warp's MMAs can lie in tensor memory, too. A warp reaches 32 lanes; half of them, 16
rows, are what an MMA of 16 rows has in registers:

- A operand in 16 bits, 16 columns of K at a time: thread 4 g + t has four words, each two
  neighbours along K. They are row g and row g + 8 at 2 t, then both at 2 t + 8
  (tcgen05.st.16x128b).
- Accumulator in fp32, eight columns at a time: thread 4 g + t has columns 2 t and 2 t + 1 of row g,
  then of row g + 8 (tcgen05.ld.16x256b).

So the fragments of mma.sync and wgmma go to tensor memory as they are, and a sum comes back in
their accumulator layout.

Source: PTX ISA, "Data Movement Shape" of tcgen05, and the fragments of mma.m16n8k16.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import tcgen05

from kernelkit.device.shared_words import operands
from kernelkit.plan import hw

ROWS = 128
LANE_STRIDE = 1 << 16  # a TMEM address is (lane << 16) | column


@cute.jit
def tile_at(base: cute.Pointer, column: Int32, columns: cutlass.Constexpr) -> cute.Tensor:
    """fp32 view (128, columns) of TMEM that starts at `column` of the allocation `base`."""
    return cute.make_tensor(
        base + column, cute.make_layout((ROWS, columns), stride=(LANE_STRIDE, 1))
    )


@cute.jit
def load_row(tile: cute.Tensor, row: cute.Tensor, thread: Int32) -> None:
    """Start tcgen05.ld of row `thread` of `tile` (128, N) into fp32 registers `row` (N,).

    The registers are valid, and the columns may be overwritten, after tcgen05.wait::ld.
    """
    columns = cute.size(tile, mode=[1])
    operation = tcgen05.Ld32x32bOp(tcgen05.Repetition(columns))
    copy = tcgen05.make_tmem_copy(cute.make_copy_atom(operation, Float32), tile)
    source = copy.get_slice(thread).partition_S(tile)
    target = cute.make_tensor(row.iterator, cute.make_layout(((columns, 1), 1, 1)))
    cute.copy(copy, source, target)


@cute.jit
def store_row(row: cute.Tensor, tile: cute.Tensor, thread: Int32) -> None:
    """Start tcgen05.st of fp32 registers `row` (N,) into row `thread` of `tile` (128, N).

    Another warp or the tensor core may read it after tcgen05.wait::st and a signal.
    """
    columns = cute.size(tile, mode=[1])
    operation = tcgen05.St32x32bOp(tcgen05.Repetition(columns))
    copy = tcgen05.make_tmem_copy(cute.make_copy_atom(operation, Float32), tile)
    target = copy.get_slice(thread).partition_D(tile)
    source = cute.make_tensor(row.iterator, cute.make_layout(((columns, 1), 1, 1)))
    cute.copy(copy, source, target)


@cute.jit
def columns_of(
    row: cute.Tensor, first: cutlass.Constexpr, columns: cutlass.Constexpr
) -> cute.Tensor:
    """Registers [first, first + columns) of a register row."""
    return cute.make_tensor(row.iterator + first, cute.make_layout(columns))


@cute.jit
def wait_loads() -> None:
    """tcgen05.wait::ld: this thread's loads have reached its registers."""
    cute.arch.fence_view_async_tmem_load()


@cute.jit
def wait_stores() -> None:
    """tcgen05.wait::st: this thread's stores are in TMEM."""
    cute.arch.fence_view_async_tmem_store()


@cute.jit
def order_before_signal() -> None:
    """Keep tcgen05 operations above the arrival that announces them to other threads."""
    cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;")


@cute.jit
def order_after_wait() -> None:
    """Keep tcgen05 operations below the wait that allowed them."""
    cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")


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
