"""Fetch rows of Q, K and V to shared memory by cp.async (device code).

A thread copies the same 16 bytes of row after row, so most of an address is computed once for a
tile. Missing data becomes zeros: rows of keys past the last visible one, since a weight of 0 times
NaN is NaN; rows of queries; columns that pad a slice.
"""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from fmha.portable.args import Place, Scope
from fmha.portable.plan import PortablePlan
from fmha.shared.args import Tables, Walk, Work
from fmha.shared.walk import entry_of_q, first_key, row_of
from kernelkit.device.warp_mma import CHUNK_BYTES, copy_chunk_unless
from kernelkit.plan import hw


@cute.jit
def fetch_q(plan: PortablePlan, work: Work, scope: Scope, place: Place) -> None:
    """Fetch a warp's slice of its team's rows, which no other warp reads.

    If warps share keys, fetch this warp's part of whole rows.
    """
    layout, q = plan.layout, scope.inputs.q
    item, row_bytes = plan.config.q_item_bytes, layout.sized.k_row_bytes
    chunks = layout.dims * item // CHUNK_BYTES  # of a row
    first = scope.buffers.q + place.team * (layout.rows * row_bytes)
    warps, own = layout.shape.slices // layout.shape.dim_slices, Int32(0)
    begin = place.slice * layout.dims
    if cutlass.const_expr(layout.shape.shares_keys):
        own, begin = place.slice, Int32(0)
    first += begin * item
    pieces = layout.rows * chunks // hw.WARP_THREADS  # of a chunk for each lane
    for turn in cutlass.range_constexpr(-(-pieces // warps)):
        piece = turn * warps + own
        number = place.lane + piece * hw.WARP_THREADS
        row, chunk = number // chunks, number % chunks
        at = row_of(plan, work, scope.tensors, scope.scalars, place.team, row)
        column = begin + chunk * (CHUNK_BYTES // item)
        valid = at.token < work.q_length
        if cutlass.const_expr(layout.dims * layout.shape.dim_slices > plan.config.head_dim):
            valid = valid and column < plan.config.head_dim
        line = q[work.q_start + at.token, None, at.head, entry_of_q(plan, work)]
        source = line.iterator.toint() + Int64(column * item)
        target = first + row * row_bytes + chunk * CHUNK_BYTES
        if cutlass.const_expr((turn + 1) * warps <= pieces):
            copy_chunk_unless(target, source, not valid)
        else:
            if piece < pieces:
                copy_chunk_unless(target, source, not valid)


@dataclass(frozen=True)
class Coming:
    """Rows of a key tile of K or V that a thread fetches to shared memory one after the other.

    The rows begin at the thread's first key and have a fixed stride.
    """

    source: cute.Tensor
    work: Work
    tables: Tables
    line: Int64  # address of its chunk of the first row; with pages, of the first page's first row
    step: Int64  # bytes from one row of the thread to its next
    place: Int32  # shared address of the first row
    own: Int32  # index of the first row in the tile
    first: Int32  # key of the first row
    left: Int32  # visible keys from `first` on; later rows become zeros


@cute.jit
def fetch_keys(
    plan: PortablePlan,
    work: Work,
    walk: Walk,
    scope: Scope,
    thread: Int32,
    step: Int32,
    stage: Int32,
    *,
    of: cutlass.Constexpr = "kv",
) -> None:
    """Fetch key tile number `step` of K, of V or of both into `stage`, if the tile exists.

    Called by all threads; does not wait.
    """
    if step < walk.tiles:
        for name in cutlass.range_constexpr(len(of)):
            coming = coming_rows(plan, work, walk, scope, thread, step, stage, of=of[name])
            fetch_part(plan, coming, 0, 1, of=of[name])


@cute.jit
def coming_rows(
    plan: PortablePlan,
    work: Work,
    walk: Walk,
    scope: Scope,
    thread: Int32,
    step: Int32,
    stage: Int32,
    *,
    of: cutlass.Constexpr,
) -> Coming:
    """Return the rows of a thread of key tile number `step`; all zeros if there is no such tile."""
    inputs, buffers, keys = scope.inputs, scope.buffers, plan.layout.tile_n
    source, ring = (inputs.k, buffers.k) if of == "k" else (inputs.v, buffers.v)
    row_bytes, chunks, rows = _sizes(plan, of)
    own, chunk = thread // chunks, thread % chunks
    key = first_key(plan, walk, step) + own
    line, bytes_of_key = _first_row(plan, source, work, key)
    # Columns that only pad a slice are not read.
    given = cute.size(source, mode=[1]) * plan.config.io_bytes // CHUNK_BYTES
    seen = step < walk.tiles and chunk < given
    return Coming(
        source,
        work,
        scope.tensors.tables,
        line + Int64(chunk * CHUNK_BYTES),
        bytes_of_key * rows,
        ring + stage * (keys * row_bytes) + own * row_bytes + chunk * CHUNK_BYTES,
        own,
        key,
        walk.seen_end - key if seen else Int32(0),
    )


@cute.jit
def fetch_part(
    plan: PortablePlan,
    coming: Coming,
    part: cutlass.Constexpr,
    parts: cutlass.Constexpr,
    *,
    of: cutlass.Constexpr,
) -> Coming:
    """Fetch part `part` of `parts` of the rows; return the remaining rows."""
    row_bytes, chunks, rows = _sizes(plan, of)
    turns = -(-plan.layout.tile_n // rows)
    for turn in cutlass.range_constexpr(part * turns // parts, (part + 1) * turns // parts):
        address, missing = coming.line, coming.left <= 0
        if cutlass.const_expr(plan.config.page_size > 0):
            offset, there = _row_in_page(plan, coming, turn * rows)
            address, missing = coming.line + offset, missing or not there
        last = min(rows, plan.layout.tile_n - turn * rows)
        if cutlass.const_expr(last * chunks == plan.layout.threads):
            copy_chunk_unless(coming.place + turn * rows * row_bytes, address, missing)
        else:
            if coming.own < last:
                copy_chunk_unless(coming.place + turn * rows * row_bytes, address, missing)
        line, left = _next(coming.line, coming.step), _next(coming.left, Int32(-rows))
        if cutlass.const_expr(plan.config.page_size > 0):
            line = coming.line
        coming = replace(coming, line=line, left=left)
    return coming


@cute.jit
def _next(number: Any, step: Any) -> Any:
    """Return the sum. Inline PTX keeps ptxas from computing it for all rows at once, in more
    registers.
    """
    size = number.width
    return cute.arch.inline_ptx(
        f"add.s{size} {{$w0}}, {{$r0}}, {{$r1}};",
        write_only_types=[type(number)],
        read_only_args=[number, step],
    )


def _sizes(plan: PortablePlan, of: str) -> tuple[int, int, int]:
    """Return (bytes from a row of K or V to the next, chunks of a row, rows that all threads fetch
    at a time).
    """
    sized = plan.layout.sized
    row_bytes = sized.k_row_bytes if of == "k" else sized.v_row_bytes
    chunks = row_bytes // CHUNK_BYTES - 1
    return row_bytes, chunks, min(plan.layout.threads // chunks, plan.layout.tile_n)


@cute.jit
def _first_row(
    plan: PortablePlan, source: cute.Tensor, work: Work, key: Int32
) -> tuple[Int64, Int64]:
    """Return (address of the row of `key` in global memory, bytes to the next row).

    With pages, the address of the first page.
    """
    entry, row = work.batch, work.kv_start + key
    if cutlass.const_expr(plan.config.varlen_k):
        entry = Int32(0)
    if cutlass.const_expr(plan.config.page_size > 0):
        entry, row = Int32(0), Int32(0)
    line = source[row, None, work.kv_head, entry]
    return line.iterator.toint(), Int64(source.stride[0]) * plan.config.io_bytes


@cute.jit
def _row_in_page(
    plan: PortablePlan, coming: Coming, row: cutlass.Constexpr
) -> tuple[Int64, Boolean]:
    """Return (bytes from the first page's first row to the row of a key, whether the pool has its
    page).
    """
    size, item = plan.config.page_size, plan.config.io_bytes
    source, table, key = coming.source, coming.tables.page_table, coming.first + row
    # The first key of a tile that does not exist may be anywhere, even negative.
    place = cutlass.max(cutlass.min(key // size, cute.size(table, mode=[1]) - 1), 0)
    page = table[coming.work.batch, place]
    there = page >= 0 and page < cute.size(source, mode=[3])
    offset = Int64(page) * source.stride[3] + Int64(key % size) * source.stride[0]
    return offset * item, there
