"""Triton's kernels of `lab.bench.peers.glue`: block tables and SwiGLU. It needs Triton."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

WARPS = 4
COLUMNS = 1024  # that a program of SwiGLU computes


@triton.jit
def _lay_blocks(
    offsets: tl.tensor,
    slot_of_row: tl.tensor,
    slots: tl.tensor,
    tables: tl.tensor,
    EXPERTS: tl.constexpr,
    TABLE: tl.constexpr,
    BLOCK: tl.constexpr,
    PLACES: tl.constexpr,
) -> None:
    """Write one block a program. TABLE, PLACES: powers of 2 that hold EXPERTS and BLOCK."""
    number = tl.program_id(0)
    each = tl.arange(0, TABLE)
    first = tl.load(offsets + each, mask=each < EXPERTS, other=0)
    end = tl.load(offsets + each + 1, mask=each < EXPERTS, other=0)
    needed = (end - first + BLOCK - 1) // BLOCK
    ends = tl.cumsum(needed, 0)
    total = tl.sum(needed, 0)
    expert = tl.sum(tl.where(ends <= number, 1, 0), 0)
    mine = each == expert
    begin = tl.sum(tl.where(mine, first, 0), 0)
    stop = tl.sum(tl.where(mine, end, 0), 0)
    before = tl.sum(tl.where(mine, ends - needed, 0), 0)
    place = tl.arange(0, PLACES)
    row = begin + (number - before) * BLOCK + place
    inside = (row < stop) & (number < total)
    slot = tl.load(slot_of_row + row, mask=inside, other=0)
    slot = tl.where(inside, slot, tl.load(offsets + EXPERTS))
    tl.store(slots + number * BLOCK + place, slot, mask=place < BLOCK)
    tl.store(tables + number, tl.where(number < total, expert, -1))
    if number == 0:
        tl.store(tables + tl.num_programs(0), total * BLOCK)


def lay_blocks(
    offsets: torch.Tensor, slot_of_row: torch.Tensor, block: int, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int32 [most * block], the slots of all blocks, and int32 [most + 1], the expert of
    each block and, at the end, the places of the blocks that are needed; in one launch."""
    slots, tables = offsets.new_empty(most * block), offsets.new_empty(most + 1)
    experts = len(offsets) - 1
    sizes = {"EXPERTS": experts, "TABLE": triton.next_power_of_2(experts)}
    sizes |= {"BLOCK": block, "PLACES": triton.next_power_of_2(block)}
    _lay_blocks[(most,)](offsets, slot_of_row, slots, tables, **sizes, num_warps=WARPS)
    return slots, tables


@triton.jit
def _swiglu(
    both: tl.tensor,
    out: tl.tensor,
    columns: tl.tensor,
    alpha: tl.tensor,
    beta: tl.tensor,
    limit: tl.tensor,
    ALTERNATING: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Write COLUMNS columns of a row a program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    place = both + row * 2 * columns
    if ALTERNATING:
        gate = tl.load(place + 2 * column, mask=inside, other=0).to(tl.float32)
        up = tl.load(place + 2 * column + 1, mask=inside, other=0).to(tl.float32)
    else:
        gate = tl.load(place + column, mask=inside, other=0).to(tl.float32)
        up = tl.load(place + columns + column, mask=inside, other=0).to(tl.float32)
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    y = gate / (1 + tl.exp(-alpha * gate)) * (up + beta)
    tl.store(out + row * columns + column, y.to(out.dtype.element_ty), mask=inside)


def swiglu(both: torch.Tensor, form: Any, alternating: bool) -> torch.Tensor:
    """Compute SwiGLU of [R, 2 I] in one launch."""
    rows, columns = both.shape[0], both.shape[1] // 2
    out = both.new_empty(rows, columns)
    limit = math.inf if form.limit is None else form.limit
    how = {"ALTERNATING": alternating, "COLUMNS": COLUMNS, "num_warps": WARPS}
    grid = rows, triton.cdiv(columns, COLUMNS)
    _swiglu[grid](both, out, columns, form.alpha, form.beta, limit, **how)
    return out
