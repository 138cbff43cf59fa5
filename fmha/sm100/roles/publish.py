"""Where the softmax warps put P: over the tail of their S in TMEM, or in shared memory
(device code).

Coordinates come from the load of S: register n of a thread is column half * lane_columns + n of
its row, so no layout of the second product has to agree with that of the first.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fmha.shared.types import IO_TYPES
from fmha.sm100.args import Lane
from fmha.sm100.layout import CHUNK
from fmha.sm100.lines import store_part
from fmha.sm100.plan import Plan
from kernelkit.device import tmem
from kernelkit.device.boxes import Box
from kernelkit.plan import hw


@cute.jit
def store_p(
    plan: Plan,
    lane: Lane,
    stage: Int32,
    begin: cutlass.Constexpr,
    end: cutlass.Constexpr,
) -> None:
    """Round weights [begin, end) of the lane and store them where the P V of S stage `stage` reads
    them.

    TMEM: complete after tcgen05.wait::st. Shared memory: its only buffer must be free; the stores
    are fenced for the tensor core, which reads through the async proxy.
    """
    io = IO_TYPES[plan.config.keys_dtype]
    for column in cutlass.range_constexpr(begin, end, CHUNK):
        width = min(CHUNK, end - column)
        packed = cute.make_rmem_tensor(width * io.width // Float32.width, Float32)
        rounded = cute.recast_tensor(packed, io)
        rounded.store(tmem.columns_of(lane.scores, column, width).load().to(io))
        if cutlass.const_expr(plan.layout.p_in_smem):
            box = Box(plan.layout.rows, hw.SMEM_LINE_BYTES // plan.config.io_bytes, io)
            lane_columns = plan.layout.lane_columns
            store_part(
                box, lane.buffers.p, lane.row, rounded, column, lane_columns, plan.layout.tile_n
            )
        else:
            store_over_s(plan, lane, packed, stage, column)
    if cutlass.const_expr(plan.layout.p_in_smem):
        cute.arch.fence_proxy("async.shared", space="cta")


@cute.jit
def store_over_s(
    plan: Plan, lane: Lane, packed: cute.Tensor, stage: Int32, column: cutlass.Constexpr
) -> None:
    """Start the store of weights from `column` on, two or more per TMEM column."""
    first, second = plan.tmem["P0"], plan.tmem["P1"]
    begin = first.begin + stage * (second.begin - first.begin)
    begin += column * plan.config.io_bytes // hw.TMEM_CELL_BYTES
    tile = tmem.tile_at(lane.buffers.tmem, begin, cute.size(packed))
    tmem.store_row(packed, tile, lane.row.lane)
