"""O on its way to global memory: the end of a block for the correction, and the store role (device
code).

O leaves TMEM in chunks of columns, never as a whole row: 256 of them would not fit in registers.
They go panel by panel into sO, and the store warp sends each panel by TMA; or, where a box of rows
would cover what is not of this tile, to global memory by predicated vector stores.

A model that caches rotated keys as values (multi-head latent attention) gets an O whose last dims
are rotated; rotating them back by the angle of the query's position leaves relative positions.
"""

from dataclasses import dataclass
from math import gcd

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fmha.shared.args import Globals, Scope, Tables, Walk, Work
from fmha.shared.epilogue import round_output
from fmha.shared.load import o_box, panel_at
from fmha.shared.walk import (
    angle_row,
    box_row,
    count_rounds,
    entry_of_q,
    locate,
    own_tile,
    stored_by_tma,
)
from fmha.sm100.plan import Plan
from fmha.sm100.roles.rows import Lane, OwnRow, o_column, store_line
from kernelkit.device import tmem
from kernelkit.device.boxes import BoxPosition, copy_out
from kernelkit.device.pipelines import consumer_state

VECTOR = 4  # fp32 angles of a 16-byte load


@dataclass(frozen=True)
class Factors:
    """Factors of a row of O: `sums` of what is read from TMEM, `narrow` of what becomes e4m3."""

    sums: Float32
    narrow: Float32 | None


@cute.jit
def rotate_back(
    plan: Plan,
    work: Work,
    row: OwnRow,
    values: cute.Tensor,
    first: cutlass.Constexpr,
    tables: Tables,
) -> None:
    """values (N,): dims of O from `first` on; in a CTA pair `first` is that of its first half.

    Of them those in the last rope_dim, as neighbouring pairs (x, y), become
    (x cos + y sin, y cos - x sin), the angle being that of the row's position.
    """
    config = plan.config
    rope_begin = config.v_dim - config.rope_dim
    pairs = gcd(VECTOR, config.rope_dim // 2)
    position = angle_row(work, row.token, tables)
    for start in cutlass.range_constexpr(0, cute.size(values), 2 * pairs):
        dim = first + start - rope_begin
        last_dim = dim + (plan.layout.halves - 1) * plan.layout.o_columns
        part = cute.make_tensor(values.iterator + start, cute.make_layout(2 * pairs))
        if cutlass.const_expr(dim >= 0):
            rotate_pairs(part, tables, position, dim + row.half * (last_dim - dim))
        elif cutlass.const_expr(last_dim >= 0):
            if row.half == 1:
                rotate_pairs(part, tables, position, last_dim)


@cute.jit
def rotate_pairs(part: cute.Tensor, tables: Tables, position: Int32, dim: Int32) -> None:
    """Turn `part` (2 * pairs,), whose first element is dim `dim` of the rotated ones."""
    pairs = cute.size(part) // 2
    cos, sin = (cute.make_rmem_tensor(pairs, Float32) for _ in range(2))
    for table, angles in ((tables.cos, cos), (tables.sin, sin)):
        source = cute.local_tile(table[position, None], (pairs,), (dim // (2 * pairs),))
        cute.autovec_copy(source, angles)
    for pair in cutlass.range_constexpr(pairs):
        x, y = part[2 * pair], part[2 * pair + 1]
        part[2 * pair] = x * cos[pair] + y * sin[pair]
        part[2 * pair + 1] = y * cos[pair] - x * sin[pair]


@cute.jit
def store_piece(
    plan: Plan,
    work: Work,
    walk: Walk,
    lane: Lane,
    factors: Factors,
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
            values.store(values.load() * factors.sums)
        v_piece, inside = divmod(column, layout.o_columns)
        first = v_piece * layout.o_tile + inside
        if cutlass.const_expr(plan.config.rope_dim > 0):
            rotate_back(plan, work, lane.row, values, first, tensors.tables)
        rounded = round_output(plan, values, factors.narrow)
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


class Store:
    """Empties sO. Rows beyond the tensor are dropped; nobody waits for the rest of a copy."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.role = plan.roles["store"]

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warp."""
        box, layout = o_box(self.plan), self.plan.layout
        pipes, order = scope.pipes, scope.tensors.order
        state = consumer_state(self.plan.edges["out"].stages)
        for turn in cutlass.range(count_rounds(self.plan, order), unroll=1):
            work = locate(self.plan, scope.tensors, turn)
            if stored_by_tma(self.plan, work):
                entry = entry_of_q(self.plan, work)
                for q_tile in cutlass.range_constexpr(layout.q_tiles):
                    tile = own_tile(self.plan, work, q_tile)
                    row = box_row(self.plan, work, tile)
                    for piece in cutlass.range_constexpr(layout.out_pieces):
                        pipes.out.wait(state)
                        for half in cutlass.range_constexpr(layout.halves):
                            column = out_column(self.plan, piece, half)
                            position = BoxPosition(row, column, work.head, entry)
                            index = state.index * layout.halves + half
                            source = panel_at(layout, box, scope.buffers.o, index)
                            copy_out(scope.tma.o, box, position, source)
                        cute.arch.cp_async_bulk_commit_group()
                        # The shared memory is the store's until the copy has read it.
                        cute.arch.cp_async_bulk_wait_group(0, read=True)
                        pipes.out.release(state.index)
                        state.advance()


def out_column(plan: Plan, piece: int, half: int) -> int:
    """First column of O in panel `piece` of a lane that holds this half of the row."""
    layout = plan.layout
    v_piece, column = divmod(piece * layout.o_panel, layout.o_columns)
    return v_piece * layout.o_tile + half * layout.o_columns + column
