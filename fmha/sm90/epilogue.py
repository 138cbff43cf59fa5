"""O, its LSE and its maximum on their way to global memory (device code).

A warpgroup puts its O into shared memory, whence TMA stores it; or, where a box of rows would cover
what is not of this tile, or O is fp32, each thread stores its pairs of columns.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32
from cutlass.cute.nvgpu import warp

from fmha.device.args import Scope, Work
from fmha.device.boxes import o_box, panel_at
from fmha.device.scales import value_scale
from fmha.device.types import OUT_TYPES
from fmha.device.walk import angle_row, box_row, entry_of_q, own_tile
from fmha.sm90.barriers import THREADS, meet
from fmha.sm90.plan import Plan90
from fmha.sm90.products import K, make_pv_mma, panels_of
from fmha.sm90.rows import Lane
from fmha.sm90.softmax import Reference, rescale, scale_of
from kernelkit import hw
from kernelkit.boxes import BoxPosition, copy_out
from kernelkit.log2 import LN_2
from kernelkit.online_softmax import finish_row
from kernelkit.umma import shared


@cute.jit
def own_sinks(plan: Plan90, lane: Lane, tensors: object) -> tuple[Float32 | None, Float32 | None]:
    """The sinks of the rows' heads, fetched long before they are used; None without."""
    if cutlass.const_expr(not plan.config.sinks):
        return None, None
    return tuple(tensors.tables.sinks[row.head] for row in lane.rows)


@cute.jit
def store_statistics(
    plan: Plan90,
    work: Work,
    lane: Lane,
    reference: Reference,
    sinks: tuple[Float32 | None, Float32 | None],
    scope: Scope,
) -> tuple[Float32, Float32]:
    """Store LSE and row_max in natural log; returns what normalises the rows of O."""
    tensors, factors = scope.tensors, []
    for half in cutlass.range_constexpr(2):
        row = lane.rows[half]
        scale_log2 = scale_of(plan, reference, scope.scalars, half)
        max_log2 = reference.row_max[half] * scale_log2
        if cutlass.const_expr(plan.config.softcap):
            max_log2 += scale_log2 * 0.5  # the c that `softcap` leaves out
        if cutlass.const_expr(plan.config.is_fp8):
            max_log2 = max_log2 - plan.config.bias_log2  # whose weight is 1
        factor, lse = finish_row(max_log2, reference.row_sum[half], sinks[half])
        if lane.real[half] and lane.column == 0 and lane.part == 0:
            place = (work.q_start + row.token, row.head, entry_of_q(plan, work))
            tensors.lse[place] = lse
            if cutlass.const_expr(tensors.row_max is not None):
                tensors.row_max[place] = max_log2 * LN_2
        factors.append(factor)
    return tuple(factors)


@cute.jit
def store_o(
    plan: Plan90,
    work: Work,
    lane: Lane,
    o: cute.Tensor,
    factors: tuple[Float32, Float32],
    scope: Scope,
    by_tma: Boolean,
) -> None:
    """O of the query tile to global memory, normalised, turned back and rounded as the config
    says. by_tma: where a box covers nothing else, and its place in shared memory is free."""
    if cutlass.const_expr(plan.config.normalize):
        rescale(o, factors)
    scale = value_scale(scope.tensors.tables, work)
    if cutlass.const_expr(scale is not None):
        rescale(o, (scale, scale))
    if cutlass.const_expr(plan.config.rope_dim > 0):
        rotate_back(plan, work, lane, o, scope)
    rounded = cute.make_rmem_tensor(o.shape, OUT_TYPES[plan.config.o_dtype])
    rounded.store(o.load().to(rounded.element_type))
    if cutlass.const_expr(not plan.layout.o_in_smem):
        store_pairs(plan, work, lane, rounded, scope)
    elif by_tma:
        store_by_tma(plan, work, lane, rounded, scope)
    else:
        store_pairs(plan, work, lane, rounded, scope)


@cute.jit
def store_by_tma(plan: Plan90, work: Work, lane: Lane, rounded: cute.Tensor, scope: Scope) -> None:
    """Through the tile's place in shared memory. The first warp of the warpgroup sends it away, and
    waits until that has been read where Q is to be loaded there."""
    layout, box = plan.layout, o_box(plan)
    bytes_apart = layout.q_bytes if layout.o_over_q else layout.o_bytes
    place = lane.tile * (bytes_apart // plan.config.out_bytes)
    place += lane.part * (layout.rows * layout.o_columns)
    buffer = scope.buffers.o + place
    buffer = buffer.align(hw.SMEM_SWIZZLE_ALIGN)
    if lane.warp == 0:
        cute.arch.cp_async_bulk_wait_group(0, read=True)
    meet(lane)
    mma = make_pv_mma(plan, layout.o_columns)
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), rounded.element_type)
    copy = cute.make_tiled_copy_C(atom, mma)
    thread, _, _ = cute.arch.thread_idx()
    part = copy.get_slice(thread % THREADS)
    lines = panels_of(plan.config.o_dtype, K, layout.rows, layout.o_columns, layout.o_panel, 1)
    tile = shared(buffer, lines)[None, None, 0]
    cute.copy(copy, part.retile(rounded), part.partition_D(tile))
    cute.arch.fence_proxy("async.shared", space="cta")
    meet(lane)
    if lane.warp == 0:
        number = own_tile(plan, work, lane.tile)
        row, entry = box_row(plan, work, number), entry_of_q(plan, work)
        for panel in cutlass.range_constexpr(layout.o_columns // box.columns):
            column = lane.part * layout.o_columns + panel * box.columns
            position = BoxPosition(row, column, work.head, entry)
            copy_out(scope.tma.o, box, position, panel_at(layout, box, buffer, panel))
        cute.arch.cp_async_bulk_commit_group()
        if cutlass.const_expr(layout.o_over_q):
            cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def store_pairs(plan: Plan90, work: Work, lane: Lane, rounded: cute.Tensor, scope: Scope) -> None:
    """Each thread's pairs of columns, where the entry has the row."""
    batch = entry_of_q(plan, work)
    for half in cutlass.range_constexpr(2):
        row = lane.rows[half]
        if lane.real[half]:
            line = scope.tensors.o[work.q_start + row.token, None, row.head, batch]
            first = (lane.part * plan.layout.o_columns + lane.column) // 2
            for block in cutlass.range_constexpr(plan.layout.o_columns // 8):
                start = rounded.iterator + 4 * block + 2 * half
                pair = cute.make_tensor(start, cute.make_layout(2))
                target = cute.local_tile(line, (2,), (first + block * 4,))
                cute.autovec_copy(pair, target)


@cute.jit
def rotate_back(plan: Plan90, work: Work, lane: Lane, o: cute.Tensor, scope: Scope) -> None:
    """The last rope_dim columns of O: pairs (x, y) of neighbours become
    (x cos + y sin, y cos - x sin), the angle being that of the row's position."""
    config, tables = plan.config, scope.tensors.tables
    begin, columns = config.v_dim - config.rope_dim, plan.layout.o_columns
    first = max(columns - config.rope_dim, 0)  # of a part, whose other columns are never turned
    for half in cutlass.range_constexpr(2):
        position = angle_row(work, lane.rows[half].token, tables)
        for block in cutlass.range_constexpr(first // 8, columns // 8):
            dim = lane.part * columns + 8 * block + lane.column - begin
            if dim >= 0:
                place = 4 * block + 2 * half
                cos, sin = tables.cos[position, dim // 2], tables.sin[position, dim // 2]
                x, y = o[place], o[place + 1]
                o[place] = x * cos + y * sin
                o[place + 1] = y * cos - x * sin
