"""O on its way to global memory: the end of a block for the correction (device code).

O leaves TMEM in chunks of columns, never as a whole row: 256 of them would not fit in registers.
They go panel by panel into sO, for the store warp to send by TMA; or, where a box of rows would
cover what is not of this tile, to global memory by predicated vector stores.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fmha.shared.args import Globals, Scope, Walk, Work
from fmha.shared.boxes import o_box
from fmha.shared.types import OUT_TYPES
from fmha.shared.walk import entry_of_q, stored_by_tma
from fmha.sm100.args import Lane
from fmha.sm100.lines import store_line
from fmha.sm100.plan import Plan
from fmha.sm100.roles.rope import rotate_back
from fmha.sm100.roles.rows import o_column
from kernelkit.device import tmem


@cute.jit
def store_piece(
    plan: Plan,
    work: Work,
    walk: Walk,
    lane: Lane,
    factor: Float32,
    piece: cutlass.Constexpr,
    stage: Int32,
    scope: Scope,
) -> None:
    """Store panel `piece` of the lane's part of its row, by TMA through stage `stage` of sO, which
    is free. The caller has waited for the last O; with its last panel read, O is given back."""
    pipes, tensors, layout = lane.pipes, scope.tensors, plan.layout
    by_tma = stored_by_tma(plan, work)
    for chunk in cutlass.range_constexpr(0, layout.o_panel, layout.o_chunk):
        column = piece * layout.o_panel + chunk
        values = read_columns(plan, walk, lane, column)
        if cutlass.const_expr(column + layout.o_chunk == layout.out_pieces * layout.o_panel):
            if cutlass.const_expr(not plan.config.ragged_keys):
                if walk.tiles > 0:
                    tmem.order_before_signal()
                    pipes.o.release(lane.row.q_tile)
        if cutlass.const_expr(plan.config.normalize or plan.config.v_scale):
            values.store(values.load() * factor)
        v_piece, inside = divmod(column, layout.o_columns)
        first = v_piece * layout.o_tile + inside
        if cutlass.const_expr(plan.config.rope_dim > 0):
            rotate_back(plan, work, lane.row, values, first, tensors.tables)
        rounded = cute.make_rmem_tensor(layout.o_chunk, OUT_TYPES[plan.config.o_dtype])
        rounded.store(values.load().to(rounded.element_type))
        if by_tma:
            index = stage * plan.layout.halves + lane.row.half
            store_line(
                plan.layout.rows, o_box(plan), lane.buffers.o, index, lane.row.row, chunk, rounded
            )
        else:
            store_in_tensor(plan, work, lane, rounded, first, tensors)
    if by_tma:
        cute.arch.fence_proxy("async.shared", space="cta")
        pipes.out.signal(stage)


@cute.jit
def read_columns(plan: Plan, walk: Walk, lane: Lane, column: cutlass.Constexpr) -> cute.Tensor:
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
    plan: Plan,
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
        chunk = first // width + row.half * (plan.layout.o_columns // width)
        cute.autovec_copy(rounded, cute.local_tile(line, (width,), (chunk,)))
