"""Q in bf16 as two tiles of e4m3, in its own place in shared memory: a row a thread (device code).

The softmax warps of a query tile do it, at the beginning of a block. In the ping-pong schedule the
MMA warp waits for their last P of the block before, anyway, and those of the other tile compute
meanwhile; the power of two of a row is known where its scores are.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32

from fmha.device.boxes import q_box
from fmha.device.split import largest_of, power_of, two_terms
from fmha.device.types import IO_TYPES
from fmha.sm100.args import Row
from fmha.sm100.lines import load_line, store_line
from fmha.sm100.plan import SPLIT_BARRIER, Plan
from kernelkit import hw, tmem
from kernelkit.boxes import Box

WORDS = 4  # of a unit


@cute.jit
def split_row(plan: Plan, row: Row, buffer: cute.Pointer) -> Float32:
    """The thread's row of sQ as two terms, for the tensor core; returns what its scores are to be
    multiplied by. Every thread of the query tile takes part."""
    layout, head_dim = plan.layout, plan.config.head_dim
    words = cute.make_rmem_tensor(head_dim // 2, Uint32)
    read_row(plan, row, buffer, words)
    if cutlass.const_expr(layout.q_rows < layout.rows):
        if row.row >= layout.q_rows:  # they hold anything
            words.fill(0)
    factor, power = power_of(largest_of(words))
    cute.arch.barrier(
        barrier_id=SPLIT_BARRIER + row.q_tile, number_of_threads=layout.rows * layout.halves
    )
    box = Box(layout.rows, layout.panel(layout.k_columns), IO_TYPES[plan.config.keys_dtype])
    buffer = cute.recast_ptr(buffer, dtype=box.element)
    panels = head_dim // box.columns
    for unit in cutlass.range_constexpr(head_dim // hw.SMEM_UNIT_BYTES):
        first, second = (cute.make_rmem_tensor(WORDS, Uint32) for _ in range(2))
        for part in cutlass.range_constexpr(2):
            begin = unit * 2 * WORDS + part * WORDS
            terms = two_terms(tuple(words[begin + word] for word in range(WORDS)), factor)
            for word in cutlass.range_constexpr(2):
                first[2 * part + word], second[2 * part + word] = terms[word], terms[2 + word]
        panel, column = divmod(unit * hw.SMEM_UNIT_BYTES, box.columns)
        for number, term in enumerate((first, second)):
            index = (row.q_tile * 2 + number) * panels + panel
            values = cute.recast_tensor(term, box.element)
            store_line(box.rows, box, buffer, index, row.row, column, values)
    cute.arch.fence_proxy("async.shared", space="cta")
    return power


@cute.jit
def read_row(plan: Plan, row: Row, buffer: cute.Pointer, words: cute.Tensor) -> None:
    """The thread's row of sQ as TMA brought it, two elements in a word."""
    box = q_box(plan)
    panels = plan.config.head_dim // box.columns
    line_words = box.columns // 2
    for panel in cutlass.range_constexpr(panels):
        part = tmem.columns_of(words, panel * line_words, line_words)
        values = cute.recast_tensor(part, box.element)
        load_line(plan.layout.rows, box, buffer, row.q_tile * panels + panel, row.row, values)
