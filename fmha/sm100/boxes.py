"""What TMA moves at a time: rows by one panel of a tile, and the layout it has in shared memory
(device code).

A panel is at most 128 bytes of every row. Its lines are swizzled inside themselves (see
`kernelkit.swizzle`). Boxes of one buffer follow each other without gaps.
"""

from math import gcd

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fmha.layout import Layout
from fmha.plan import AttentionPlan
from fmha.sm100.args import Row
from fmha.sm100.products import IO_TYPES, OUT_TYPES
from kernelkit import hw, tmem
from kernelkit.boxes import Box
from kernelkit.swizzle import turn
from kernelkit.umma import shared


def q_box(plan: AttentionPlan) -> Box:
    """Of Q: this CTA's rows of a query tile, without those that are left over."""
    layout, config = plan.layout, plan.config
    return Box(layout.q_rows, layout.panel(layout.k_columns), IO_TYPES[config.dtype])


def k_box(plan: AttentionPlan) -> Box:
    """Of K: the CTA's keys, or those of them that one page holds."""
    layout, config = plan.layout, plan.config
    rows = gcd(layout.k_rows, layout.key_step) if config.page_size else layout.k_rows
    return Box(rows, layout.panel(layout.k_columns), IO_TYPES[config.dtype])


def v_box(plan: AttentionPlan) -> Box:
    """Of V: the keys of the tile, or those of them that one page holds."""
    layout, config = plan.layout, plan.config
    rows = layout.key_step if config.page_size else layout.tile_n
    return Box(rows, layout.panel(layout.v_columns), IO_TYPES[config.dtype])


def o_box(plan: AttentionPlan) -> Box:
    """Of O: the same rows."""
    return Box(plan.layout.q_rows, plan.layout.o_panel, OUT_TYPES[plan.config.o_dtype])


@cute.jit
def store_part(
    box: Box,
    buffer: cute.Pointer,
    row: Row,
    values: cute.Tensor,
    first: cutlass.Constexpr,
    part_columns: cutlass.Constexpr,
    tile_columns: cutlass.Constexpr,
) -> None:
    """Registers `values` (N,) to columns first .. first + N of this thread's part of its row.

    part_columns: of a thread's part, all of the row or in a CTA pair half of a piece;
    tile_columns: of the query tile.
    """
    box_index = first // box.columns + row.half * (part_columns // box.columns)
    box_index += row.q_tile * (tile_columns // box.columns)
    store_line(box.rows, box, buffer, box_index, row.row, first % box.columns, values)


def panel_at(layout: Layout, box: Box, buffer: cute.Pointer, index: Int32) -> cute.Tensor:
    """The box of rows in panel `index` of query tiles: panels stand as far apart as all rows."""
    return shared(buffer + index * (layout.rows * box.columns), box.layout())


@cute.jit
def store_line(
    rows: cutlass.Constexpr,
    box: Box,
    buffer: cute.Pointer,
    index: Int32,
    row: Int32,
    first: Int32,
    values: cute.Tensor,
) -> None:
    """Registers `values` (N,) to columns first .. first + N of a row of panel `index` of the
    buffer. rows: of a panel.

    They go 16 bytes at a time; eight rows at one column lie in different banks. The swizzle is
    spelled out because a copy through `Box.at` becomes single elements.
    """
    unit = hw.SMEM_UNIT_BYTES * 8 // values.element_type.width
    units = box.columns // unit
    line = buffer + (index * rows + row) * box.columns
    moved = turn(row, units * hw.SMEM_UNIT_BYTES)
    layout = cute.make_layout(unit)
    for part in cutlass.range_constexpr(cute.size(values) // unit):
        target = line + ((first // unit + part) ^ moved) * unit
        cute.autovec_copy(
            tmem.columns_of(values, part * unit, unit),
            cute.make_tensor(target.align(hw.SMEM_UNIT_BYTES), layout),
        )
