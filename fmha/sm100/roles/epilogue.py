"""End of the softmax role: one row of O, its LSE and its maximum to global memory (device code).

Predicated vector stores, one row per thread.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from fmha.plan import AttentionPlan
from fmha.sm100.args import Lane, Outputs, Work
from fmha.sm100.products import OUT_TYPES
from kernelkit import tmem

LN_2 = math.log(2.0)


@cute.jit
def store_results(
    plan: AttentionPlan, work: Work, lane: Lane, statistics: tuple, outputs: Outputs
) -> None:
    """Store the row of this thread, if Q has it; the caller has waited for the last O.

    statistics: (row_max in units of q.k, row_sum); row_sum is 0 where the row saw no key, and then
    O = 0 and LSE = row_max = -inf.
    """
    row = lane.row
    row_max, row_sum = statistics
    factor = Float32(1.0)
    if cutlass.const_expr(plan.config.normalize):
        factor = Float32(0.0)
        if row_sum != 0.0:
            factor = cute.arch.rcp_approx(row_sum)
    values = read_output(plan, work, lane)
    if row.position < work.q_length:
        out_type = OUT_TYPES[plan.config.out_dtype]
        rounded = cute.make_rmem_tensor(plan.config.head_dim, out_type)
        rounded.store((values.load() * factor).to(out_type))
        cute.autovec_copy(rounded, outputs.o[row.position, None, work.head, work.batch])
        scale = work.scale_log2 * LN_2
        lse = -Float32.inf
        if row_sum != 0.0:
            lse = row_max * scale + cute.math.log2(row_sum, fastmath=True) * LN_2
        outputs.lse[row.position, work.head, work.batch] = lse
        if cutlass.const_expr(outputs.row_max is not None):
            outputs.row_max[row.position, work.head, work.batch] = row_max * scale


@cute.jit
def read_output(plan: AttentionPlan, work: Work, lane: Lane) -> cute.Tensor:
    """This thread's row of O, (D,) fp32; zeros where no P V ever wrote the columns."""
    output = plan.tmem["O"]
    values = cute.make_rmem_tensor(plan.config.head_dim, Float32)
    values.fill(0.0)
    if work.kv_tiles > 0:
        tmem.order_after_wait()
        tmem.load_row(
            tmem.tile_at(lane.buffers.tmem, output.begin, output.columns), values, lane.row.thread
        )
        tmem.wait_loads()
    return values
