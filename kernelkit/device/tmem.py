"""Rows of tensor memory in registers and back (device code).

An accumulator tile of 128 rows keeps row r in lane r and column n in TMEM column n
(PTX ISA, tcgen05 data path layout D). Warp w of a warpgroup reaches lanes 32 w .. 32 w + 31 only,
so thread r of the warpgroup owns row r, and a whole row needs no shuffle. In a CTA pair with 64
rows per CTA (layout B) lanes r and 64 + r hold the two halves of row r: what is said of row r
below is then said of lane r. Non-goals: M = 64 in one CTA, 16-bit accumulators.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import tcgen05

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
