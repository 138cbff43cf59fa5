"""O, its LSE and its maximum on their way to global memory: the end of the role that corrects O,
softmax or correction (device code).

O leaves TMEM in chunks of columns, never as a whole row: 256 of them would not fit in registers.
They go into the panels of sO, piece by piece, for the load warp to store by TMA; or, where a box
of rows would cover what is not of this tile, to global memory by predicated vector stores.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from fmha.plan import AttentionPlan
from fmha.sm100.args import Globals, Lane, Walk, Work
from fmha.sm100.boxes import o_box, store_part
from fmha.sm100.products import OUT_TYPES
from fmha.sm100.roles.rope import rotate_back
from fmha.sm100.roles.rows import o_column
from fmha.sm100.walk import entry_of_q, stored_by_tma
from kernelkit import tmem
from kernelkit.log2 import LN_2
from kernelkit.online_softmax import finish_row


@cute.jit
def store_results(
    plan: AttentionPlan,
    work: Work,
    walk: Walk,
    lane: Lane,
    row_max: Float32,
    row_sum: Float32,
    tensors: Globals,
) -> None:
    """Store the lane's part of its row, if the entry has it; the caller has waited for the last O.

    row_max is in units of scores; row_sum is 0 where the row saw no key.
    """
    factor = store_statistics(plan, work, lane, row_max, row_sum, tensors)
    by_tma = stored_by_tma(plan, work)
    for piece in cutlass.range_constexpr(plan.layout.v_pieces):
        for column in cutlass.range_constexpr(0, plan.layout.v_columns, plan.layout.o_chunk):
            first = piece * plan.layout.o_tile + column
            values = read_columns(plan, walk, lane, piece * plan.layout.v_columns + column)
            if cutlass.const_expr(plan.config.normalize):
                values.store(values.load() * factor)
            if cutlass.const_expr(plan.config.rope_dim > 0):
                rotate_back(plan, work, lane.row, values, first, tensors.tables)
            rounded = cute.make_rmem_tensor(plan.layout.o_chunk, OUT_TYPES[plan.config.o_dtype])
            rounded.store(values.load().to(rounded.element_type))
            if by_tma:
                columns, v_dim = plan.layout.v_columns, plan.config.v_dim
                store_part(o_box(plan), lane.buffers.o, lane.row, rounded, first, columns, v_dim)
            else:
                store_in_tensor(plan, work, lane, rounded, first, tensors)
        if cutlass.const_expr(lane.pipes.out is not None):
            if by_tma:
                cute.arch.fence_proxy("async.shared", space="cta")
                lane.pipes.out.signal(lane.row.q_tile * plan.layout.v_pieces + piece)


@cute.jit
def store_statistics(
    plan: AttentionPlan,
    work: Work,
    lane: Lane,
    row_max: Float32,
    row_sum: Float32,
    tensors: Globals,
) -> Float32:
    """Store LSE and row_max in natural log; returns what normalises the row of O."""
    config, row = plan.config, lane.row
    scale_log2 = lane.scalars.scale_log2
    max_log2 = row_max * scale_log2
    if cutlass.const_expr(config.softcap):
        max_log2 += scale_log2 * 0.5  # the c that `softcap_scores` leaves out
    sink = None
    if cutlass.const_expr(config.sinks):
        sink = tensors.tables.sinks[row.head]
    factor, lse = finish_row(max_log2, row_sum, sink)
    # One of the two lanes of a row in a CTA pair speaks for it.
    if row.token < work.q_length and row.half == 0:
        place = (work.q_start + row.token, row.head, entry_of_q(plan, work))
        tensors.lse[place] = lse
        if cutlass.const_expr(tensors.row_max is not None):
            tensors.row_max[place] = max_log2 * LN_2
    return factor


@cute.jit
def read_columns(
    plan: AttentionPlan, walk: Walk, lane: Lane, column: cutlass.Constexpr
) -> cute.Tensor:
    """o_chunk of the lane's columns of O from `column` on, fp32; zeros where no P V wrote them."""
    values = cute.make_rmem_tensor(plan.layout.o_chunk, Float32)
    values.fill(0.0)
    if walk.tiles > 0:
        tmem.order_after_wait()
        tile = tmem.tile_at(lane.buffers.tmem, o_column(plan, lane) + column, plan.layout.o_chunk)
        tmem.load_row(tile, values, lane.row.lane)
        tmem.wait_loads()
    return values


@cute.jit
def store_in_tensor(
    plan: AttentionPlan,
    work: Work,
    lane: Lane,
    rounded: cute.Tensor,
    first: cutlass.Constexpr,
    tensors: Globals,
) -> None:
    """`rounded` (o_chunk,) to columns `first` .. of the row of the tensor, if the entry has it.

    In a pair `first` is that of the first half of the columns of a piece.
    """
    row = lane.row
    if row.token < work.q_length:
        batch = entry_of_q(plan, work)
        line = tensors.o[work.q_start + row.token, None, row.head, batch]
        width = plan.layout.o_chunk
        chunk = first // width + row.half * (plan.layout.v_columns // width)
        cute.autovec_copy(rounded, cute.local_tile(line, (width,), (chunk,)))
