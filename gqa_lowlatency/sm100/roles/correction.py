"""Work of the epilogue on O between two products, and at the end (device code).

`rescale_o` multiplies columns of O whose maximum has moved. `clear_unseen_rows` zeroes rows of V
that no query row sees: their weight is 0, but 0 * NaN is NaN, and memory that a length or a window
excludes may hold anything. At the end sums and O go to the owners' mailboxes.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from gqa_lowlatency.shared import mailbox
from gqa_lowlatency.shared.split import any_row_sees
from gqa_lowlatency.sm100.args import Fill, Scope
from gqa_lowlatency.sm100.plan import TILE, Plan100
from gqa_lowlatency.sm100.roles.columns import acc_scales, is_speaker, own_column, owned, total_sums
from kernelkit.device import tmem
from kernelkit.plan import hw

CHUNK = 16  # columns of O in flight: enough to hide latency, few enough not to spill


@cute.jit
def rescale_o(plan: Plan100, scope: Scope) -> None:
    """Multiply the columns of O by their acc_scale.

    The caller has waited for the previous product and signals the next one: no product is in
    flight.
    """
    thread, _, _ = cute.arch.thread_idx()
    width = min(plan.columns, CHUNK)
    row = cute.make_rmem_tensor(width, Float32)
    tmem.order_after_wait()
    for first in cutlass.range_constexpr(0, plan.columns, width):
        factors = acc_scales(scope.buffers, plan.columns, first, width)
        for part in cutlass.range_constexpr(plan.pieces):
            begin = plan.tmem[f"O{part}"].begin + first
            tile = tmem.tile_at(scope.buffers.tmem, begin, width)
            tmem.load_row(tile, row, thread)
            tmem.wait_loads()
            for k in cutlass.range_constexpr(width):
                row[k] *= factors[k]
            tmem.store_row(row, tile, thread)
    tmem.wait_stores()


@cute.jit
def clear_unseen_rows(plan: Plan100, scope: Scope, step: Int32, first: Int32) -> None:
    """Zero rows of V of this tile before its P is published; the signal of P orders the stores.

    The caller fences the stores for the async proxy, through which the tensor core reads.
    """
    thread, _, _ = cute.arch.thread_idx()
    share = scope.share
    # K of the next tile, if there is one, lies between K and V of this one.
    place = (2 * step + 2) * plan.pieces
    if step == share.count - 1:
        place -= plan.pieces
    panels = plan.piece_columns // plan.panel
    if cutlass.const_expr(plan.stages < 2 * plan.pieces):
        # V then uses stages of K of the next tile. A wait for V would end before that K, too: an
        # mbarrier tells only odd phases from even ones. S of the next tile shows that K is there.
        if step < share.count - 1:
            scope.pipes.s.wait(Fill(Int32(0), (step + 1) % 2))
    for piece in cutlass.range_constexpr(plan.pieces):
        number = place + piece
        stage = number % plan.stages
        scope.pipes.kv.wait(Fill(stage, number // plan.stages % 2))
        if not any_row_sees(plan.config, share, first + thread):
            words = plan.line_bytes // 4
            zeros = cute.make_rmem_tensor(words, Int32)
            zeros.fill(0)
            for panel in cutlass.range_constexpr(panels):
                # A line of zeros needs no swizzle: it stays within the line.
                line = ((stage * panels + panel) * TILE + thread) * plan.panel
                start = cute.recast_ptr(
                    (scope.buffers.ring + line).align(hw.SMEM_UNIT_BYTES), dtype=Int32
                )
                cute.autovec_copy(zeros, cute.make_tensor(start, cute.make_layout(words)))


@cute.jit
def deliver_statistics(
    plan: Plan100, scope: Scope, row_max: cute.Tensor, row_sum: cute.Tensor, parity: Int32
) -> None:
    """Send maximum and sum of every column; the lanes of the first warp that own the
    column send.
    """
    totals = total_sums(scope.buffers, row_sum, parity)
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp == 0 and is_speaker(plan.columns):
        for k in cutlass.range_constexpr(owned(plan.columns)):
            column = own_column(plan.columns) + k
            found = mailbox.Statistics(row_max[k] - plan.bias_log2, totals[k])
            mailbox.send_statistics(plan.config, scope.box, scope.place.rank, column, found)


@cute.jit
def deliver_o(plan: Plan100, scope: Scope) -> None:
    """Send O from tensor memory, not normalised; the caller has waited for the last product."""
    thread, _, _ = cute.arch.thread_idx()
    lane = thread % hw.WARP_THREADS
    row = cute.make_rmem_tensor(plan.columns, Float32)
    tmem.order_after_wait()
    for part in cutlass.range_constexpr(plan.pieces):
        begin = plan.tmem[f"O{part}"].begin
        tmem.load_row(tmem.tile_at(scope.buffers.tmem, begin, plan.columns), row, thread)
        tmem.wait_loads()
        if lane < plan.o_lanes:
            dim = part * plan.piece_columns + thread // hw.WARP_THREADS * plan.o_lanes + lane
            for column in cutlass.range(plan.columns, unroll_full=True):
                values = (row[column],)
                mailbox.send_o(plan.config, scope.box, scope.place.rank, column, dim, values)
    tmem.order_before_signal()
