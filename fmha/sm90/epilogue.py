"""Store of O to global memory (device code).

A warpgroup writes its O to shared memory, from which TMA stores it. If a box of rows would cover
rows of another entry, or O is fp32 or e4m3, the threads store pieces of their rows instead.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import warp

from fmha.shared.args import Lane, Scope, Work
from fmha.shared.epilogue import rotate_back, round_output, store_pieces
from fmha.shared.fp8 import value_scale
from fmha.shared.load import o_box, panel_at
from fmha.shared.two_rows import rescale
from fmha.shared.walk import box_row, entry_of_q, own_tile, stored_by_tma
from fmha.sm90.plan import Plan90
from fmha.sm90.products import K, make_pv_mma, panels_of
from kernelkit.device.barriers import meet
from kernelkit.device.boxes import BoxPosition, copy_out
from kernelkit.device.narrow import inverse_of
from kernelkit.device.umma import shared
from kernelkit.plan import hw


@cute.jit
def store_o(
    plan: Plan90,
    work: Work,
    lane: Lane,
    o: cute.Tensor,
    factors: tuple[Float32, Float32],
    scope: Scope,
) -> None:
    """Store O of the query tile to global memory: normalised, rotated back and rounded per the
    config.
    """
    if cutlass.const_expr(plan.config.normalize):
        rescale(o, factors)
    scale = value_scale(scope.tensors.tables, work)
    if cutlass.const_expr(scale is not None):
        rescale(o, (scale, scale))
    if cutlass.const_expr(plan.config.rope_dim > 0):
        rotate_back(plan, work, lane, o, scope, whole=True)
    rounded = round_output(plan, o, inverse_of(scope.tensors.tables.out_scale))
    if cutlass.const_expr(not plan.layout.o_in_smem):
        store_pieces(plan, work, lane, rounded, scope)
    elif stored_by_tma(plan, work):
        store_by_tma(plan, work, lane, rounded, scope)
    else:
        store_pieces(plan, work, lane, rounded, scope)


@cute.jit
def store_by_tma(plan: Plan90, work: Work, lane: Lane, rounded: cute.Tensor, scope: Scope) -> None:
    """Store O through the tile's buffer in shared memory; the first warp of the warpgroup issues
    TMA.
    """
    layout, box = plan.layout, o_box(plan)
    place = lane.tile * (layout.o_bytes // plan.config.out_bytes)
    place += lane.part * (layout.rows * layout.o_columns)
    buffer = scope.buffers.o + place
    buffer = buffer.align(hw.SMEM_SWIZZLE_ALIGN)
    if lane.warp == 0:
        cute.arch.cp_async_bulk_wait_group(0, read=True)
    meet(plan.barriers, "warpgroup", lane.team)
    mma = make_pv_mma(plan, layout.o_columns)
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), rounded.element_type)
    copy = cute.make_tiled_copy_C(atom, mma)
    thread, _, _ = cute.arch.thread_idx()
    part = copy.get_slice(thread % plan.roles["math"].team_threads)
    lines = panels_of(plan.config.o_dtype, K, layout.rows, layout.o_columns, layout.o_panel, 1)
    tile = shared(buffer, lines)[None, None, 0]
    cute.copy(copy, part.retile(rounded), part.partition_D(tile))
    cute.arch.fence_proxy("async.shared", space="cta")
    meet(plan.barriers, "warpgroup", lane.team)
    if lane.warp == 0:
        number = own_tile(plan, work, lane.tile)
        row, entry = box_row(plan, work, number), entry_of_q(plan, work)
        for panel in cutlass.range_constexpr(layout.o_columns // box.columns):
            column = lane.part * layout.o_columns + panel * box.columns
            position = BoxPosition(row, column, work.head, entry)
            copy_out(scope.tma.o, box, position, panel_at(layout, box, buffer, panel))
        cute.arch.cp_async_bulk_commit_group()
