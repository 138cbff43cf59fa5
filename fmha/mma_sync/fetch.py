"""Rows of Q, K and V to shared memory by cp.async (device code).

A thread copies the same 16 bytes of row after row, so that most of an address is computed once for
a tile. What an entry does not have becomes zeros: rows of keys past the last one that is seen,
since a weight of 0 times NaN is NaN; rows of queries; columns that only make a slice whole.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from fmha.device.args import Tables, Walk, Work
from fmha.device.walk import entry_of_q, row_of
from fmha.mma_sync.args import Place, Scope
from fmha.mma_sync.plan import PortablePlan
from kernelkit import hw
from kernelkit.warp_mma import CHUNK_BYTES, copy_chunk_unless


@cute.jit
def fetch_q(plan: PortablePlan, work: Work, scope: Scope, place: Place) -> None:
    """A warp's slice of its team's rows: nobody else reads it."""
    layout, q = plan.layout, scope.inputs.q
    item, row_bytes = plan.config.q_item_bytes, layout.sized.k_row_bytes
    chunks = layout.dims * item // CHUNK_BYTES  # of a row
    first = scope.buffers.q + place.team * (layout.rows * row_bytes)
    first += place.slice * (layout.dims * item)
    for turn in cutlass.range_constexpr(layout.rows * chunks // hw.WARP_THREADS):
        number = place.lane + turn * hw.WARP_THREADS
        row, chunk = number // chunks, number % chunks
        at = row_of(plan, work, scope.scalars, place.team, row)
        column = place.slice * layout.dims + chunk * (CHUNK_BYTES // item)
        valid = at.token < work.q_length
        if cutlass.const_expr(layout.dims * layout.shape.slices > plan.config.head_dim):
            valid = valid and column < plan.config.head_dim
        line = q[work.q_start + at.token, None, at.head, entry_of_q(plan, work)]
        source = line.iterator.toint() + Int64(column * item)
        copy_chunk_unless(first + row * row_bytes + chunk * CHUNK_BYTES, source, not valid)


@cute.jit
def fetch_keys(
    plan: PortablePlan,
    work: Work,
    walk: Walk,
    scope: Scope,
    thread: Int32,
    key: Int32,
    stage: Int32,
) -> None:
    """All threads: the tile of K and of V from `key` on into `stage`; waits for nothing."""
    sized, inputs, tables = plan.layout.sized, scope.inputs, scope.tensors.tables
    for source, ring, row_bytes in (
        (inputs.k, scope.buffers.k, sized.k_row_bytes),
        (inputs.v, scope.buffers.v, sized.v_row_bytes),
    ):
        rows = Rows(key, walk.seen_end, ring + stage * (plan.layout.tile_n * row_bytes))
        _fetch_rows(plan, source, work, tables, thread, rows, row_bytes)


@dataclass(frozen=True)
class Rows:
    """Of a key tile."""

    first: Int32  # key
    end: Int32  # rows of keys from here on become zeros
    target: Int32  # shared address


@cute.jit
def _fetch_rows(
    plan: PortablePlan,
    source: cute.Tensor,
    work: Work,
    tables: Tables,
    thread: Int32,
    tile: Rows,
    row_bytes: cutlass.Constexpr,
) -> None:
    """A key tile of one tensor."""
    threads, keys = plan.layout.threads, plan.layout.tile_n
    item = plan.config.io_bytes
    chunks = row_bytes // CHUNK_BYTES - 1
    given = cute.size(source, mode=[1]) * item // CHUNK_BYTES
    rows = min(threads // chunks, keys)  # at a time
    own, chunk = thread // chunks, thread % chunks
    place = tile.target + own * row_bytes + chunk * CHUNK_BYTES
    # Of columns that only make a slice whole no row is read.
    left = tile.end - tile.first - own if chunk < given else Int32(0)
    line, step = _first_row(plan, source, work, tile.first + own)
    line += Int64(chunk * CHUNK_BYTES)
    if own < rows:
        for turn in cutlass.range_constexpr(-(-keys // rows)):
            row, missing = turn * rows, turn * rows >= left
            address = line + step * row
            if cutlass.const_expr(plan.config.page_size > 0):
                offset, there = _row_in_page(plan, source, work, tables, tile.first + own + row)
                address, missing = line + offset, missing or not there
            if cutlass.const_expr(row + rows <= keys):
                copy_chunk_unless(place + row * row_bytes, address, missing)
            else:
                if own + row < keys:
                    copy_chunk_unless(place + row * row_bytes, address, missing)


@cute.jit
def _first_row(
    plan: PortablePlan, source: cute.Tensor, work: Work, key: Int32
) -> tuple[Int64, Int64]:
    """(where the row of `key` begins in global memory, bytes to the next row); with pages where the
    first page begins."""
    entry, row = work.batch, work.kv_start + key
    if cutlass.const_expr(plan.config.varlen_k):
        entry = Int32(0)
    if cutlass.const_expr(plan.config.page_size > 0):
        entry, row = Int32(0), Int32(0)
    line = source[row, None, work.kv_head, entry]
    return line.iterator.toint(), Int64(source.stride[0]) * plan.config.io_bytes


@cute.jit
def _row_in_page(
    plan: PortablePlan, source: cute.Tensor, work: Work, tables: Tables, key: Int32
) -> tuple[Int64, Boolean]:
    """(bytes from the first page's first row to that of `key`, whether the pool has its page)."""
    size, item = plan.config.page_size, plan.config.io_bytes
    last = cute.size(tables.page_table, mode=[1]) - 1
    page = tables.page_table[work.batch, cutlass.min(key // size, last)]
    there = page >= 0 and page < cute.size(source, mode=[3])
    offset = Int64(page) * source.stride[3] + Int64(key % size) * source.stride[0]
    return offset * item, there
