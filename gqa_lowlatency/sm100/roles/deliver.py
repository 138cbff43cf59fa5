"""The end of the epilogue: what this CTA found goes to the owners' mailboxes (device code)."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from gqa_lowlatency.shared import mailbox
from gqa_lowlatency.sm100.args import Scope
from gqa_lowlatency.sm100.plan import Plan100
from gqa_lowlatency.sm100.roles.columns import is_speaker, own_column, owned, total_sums
from kernelkit.device import tmem
from kernelkit.plan import hw


@cute.jit
def deliver_statistics(
    plan: Plan100, scope: Scope, row_max: cute.Tensor, row_sum: cute.Tensor, parity: Int32
) -> None:
    """Maximum and sum of every column, by the lanes of the first warp that own them."""
    totals = total_sums(scope.buffers, row_sum, parity)
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp == 0 and is_speaker(plan.columns):
        for k in cutlass.range_constexpr(owned(plan.columns)):
            column = own_column(plan.columns) + k
            found = mailbox.Statistics(row_max[k] - plan.bias_log2, totals[k])
            mailbox.send_statistics(plan.config, scope.box, scope.place.rank, column, found)


@cute.jit
def deliver_o(plan: Plan100, scope: Scope) -> None:
    """O from tensor memory, not normalised; the caller has waited for the last product."""
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
