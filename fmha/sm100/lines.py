"""Registers to swizzled lines of shared memory (device code)."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fmha.sm100.args import OwnRow
from kernelkit.device import tmem
from kernelkit.device.boxes import Box
from kernelkit.device.swizzle import turn
from kernelkit.plan import hw


@cute.jit
def store_part(
    box: Box,
    buffer: cute.Pointer,
    row: OwnRow,
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
