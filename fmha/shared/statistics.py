"""What a query row leaves beside its O: its LSE, and its maximum beside raw sums (device code)."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fmha.plan import AttentionPlan
from fmha.shared.args import Globals, Row, Scope, Work
from fmha.shared.walk import entry_of_q
from kernelkit.device.online_softmax import finish_row
from kernelkit.plan.log2 import LN_2


@cute.jit
def own_sink(plan: AttentionPlan, head: Int32, tensors: Globals) -> Float32 | None:
    """The sink of a row's head, fetched long before it is used; None where there is none."""
    if cutlass.const_expr(not plan.config.sinks):
        return None
    return tensors.tables.sinks[head]


@cute.jit
def finish(
    plan: AttentionPlan,
    scale_log2: Float32,
    row_max: Float32,
    row_sum: Float32,
    sink: Float32 | None,
) -> tuple[Float32, Float32, Float32]:
    """(what normalises O, LSE in natural log, row_max in log2 units) of a row.

    scale_log2: of its scores. row_max: in units of them. row_sum: 0 where the row saw no key.
    """
    max_log2 = row_max * scale_log2
    if cutlass.const_expr(plan.config.softcap):
        max_log2 += scale_log2 * 0.5  # the c that `softcap_scores` leaves out
    if cutlass.const_expr(plan.config.is_fp8):
        max_log2 = max_log2 - plan.config.bias_log2  # whose weight is 1
    factor, lse = finish_row(max_log2, row_sum, sink)
    return factor, lse, max_log2


@cute.jit
def store_statistics(
    plan: AttentionPlan, work: Work, row: Row, lse: Float32, max_log2: Float32, scope: Scope
) -> None:
    """LSE, and with raw O row_max in natural log, of a row that the entry has."""
    tensors = scope.tensors
    place = (work.q_start + row.token, row.head, entry_of_q(plan, work))
    tensors.lse[place] = lse
    if cutlass.const_expr(tensors.row_max is not None):
        tensors.row_max[place] = max_log2 * LN_2
