"""Q of packed heads: the softmax warps fetch its rows themselves (device code).

Row m of the tile is query head m mod group of token m / group, for any group. Neighbouring threads
take neighbouring 16 bytes, and the heads of a token lie next to each other, so the loads coalesce.
"""

import cutlass
import cutlass.cute as cute

from fmha.plan import AttentionPlan
from fmha.sm100.args import Scope, Work
from fmha.sm100.boxes import q_box, store_line
from fmha.sm100.walk import entry_of_q, first_row, tile_rows
from kernelkit import hw


@cute.jit
def gather_q(plan: AttentionPlan, work: Work, scope: Scope) -> None:
    """Fill sQ, rows beyond the last one with zeros, and announce it to the MMA warp.

    Each team of softmax warps fills its own query tile.
    """
    box, config = q_box(plan), plan.config
    wide = hw.TMA_ALIGN_BYTES // config.io_bytes
    per_row = config.head_dim // wide
    threads = plan.roles["softmax"].team_threads
    thread, _, _ = cute.arch.thread_idx()
    q_tile, thread = thread // threads, thread % threads
    first = first_row(plan, work, q_tile)
    for turn in cutlass.range(plan.layout.rows * per_row // threads, unroll=4):
        index = turn * threads + thread
        row, column = index // per_row, index % per_row * wide
        values = cute.make_rmem_tensor(wide, box.element)
        values.fill(0.0)
        if first + row < tile_rows(plan, work):
            token = (first + row) // work.group
            head = work.head + (first + row) % work.group
            source = scope.tensors.q[work.q_start + token, None, head, entry_of_q(plan, work)]
            cute.autovec_copy(vector(source.iterator + column, wide), values)
        panel = (q_tile * config.head_dim + column) // box.columns
        store_line(box, scope.buffers.q, panel, row, column % box.columns, values)
    cute.arch.fence_proxy("async.shared", space="cta")
    scope.pipes.q.signal(q_tile)


@cute.jit
def vector(pointer: cute.Pointer, count: cutlass.Constexpr) -> cute.Tensor:
    """`count` neighbouring elements, 16 bytes aligned."""
    return cute.make_tensor(pointer.align(hw.TMA_ALIGN_BYTES), cute.make_layout(count))
