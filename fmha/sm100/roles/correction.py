"""What the softmax warps repair so that O += P V stays right (device code).

`rescale_output` multiplies rows of O whose reference maximum moved. `clear_tail_rows` zeroes V rows
past a batch entry's length: their weight is 0, but 0 * NaN is NaN, and memory past a length may
hold anything. Rows past the end of the tensor need no such care: TMA fills them with zeros.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from fmha.plan import AttentionPlan
from fmha.sm100.args import Lane, Work
from kernelkit import tmem
from kernelkit.pipelines import draining

CHUNK = 16  # columns of O in flight: enough to hide latency, few enough not to spill
SWIZZLE_BYTES = 128  # a key row of V is one or more whole 128-byte lines, swizzled inside each


@cute.jit
def rescale_output(plan: AttentionPlan, lane: Lane, shrink: Float32) -> None:
    """O row *= shrink, skipped by a warp none of whose rows needs it.

    The caller has waited for the P V before, and signals the P V after: O is at rest.
    """
    if cute.arch.vote_any_sync(shrink < 1.0):
        tmem.order_after_wait()
        begin = plan.tmem["O"].begin
        for column in cutlass.range_constexpr(0, plan.tmem["O"].columns, CHUNK):
            tile = tmem.tile_at(lane.buffers.tmem, begin + column, CHUNK)
            part = cute.make_rmem_tensor(CHUNK, Float32)
            tmem.load_row(tile, part, lane.row.thread)
            tmem.wait_loads()
            part.store(part.load() * shrink)
            tmem.store_row(part, tile, lane.row.thread)


@cute.jit
def clear_tail_rows(plan: AttentionPlan, work: Work, lane: Lane) -> None:
    """Zero the rows of the last V tile that lie past kv_length, before any P is published.

    The walk starts at the last tile, so this is the first fill of V stage 0, and the first P
    signal tells the MMA warp. Generic-proxy stores are fenced for the async proxy of the MMA.
    """
    valid = work.kv_length - (work.kv_tiles - 1) * plan.config.tile_n
    if work.kv_tiles > 0 and valid < plan.config.tile_n:
        lane.pipes.v.wait(draining(plan.config.kv_stages))
        if lane.row.thread >= valid:
            line = SWIZZLE_BYTES // plan.config.io_bytes
            panels = plan.config.head_dim // line
            lines = cute.make_tensor(
                cute.recast_ptr(lane.buffers.v.iterator),
                cute.make_layout(
                    (line, plan.config.tile_n, panels), stride=(1, line, line * plan.config.tile_n)
                ),
            )
            zeros = cute.make_rmem_tensor(line, lane.buffers.v.element_type)
            zeros.fill(0.0)
            for panel in cutlass.range_constexpr(panels):
                cute.autovec_copy(zeros, lines[None, lane.row.thread, panel])
        cute.arch.fence_proxy("async.shared", space="cta")
