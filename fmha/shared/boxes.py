"""What TMA moves at a time: rows by one panel of a tile, and the layout it has in shared memory
(device code).

A panel is at most 128 bytes of every row. Its lines are swizzled inside themselves (see
`kernelkit.device.swizzle`). Boxes of one buffer follow each other without gaps.
"""

import cutlass.cute as cute
from cutlass import Int32

from fmha.plan import AttentionPlan
from fmha.shared.types import IO_TYPES, OUT_TYPES
from fmha.tiles import Tiles
from kernelkit.device.boxes import Box
from kernelkit.device.umma import shared


def q_box(plan: AttentionPlan) -> Box:
    """Of Q: this CTA's rows of a query tile, without those that are left over."""
    layout, config = plan.layout, plan.config
    columns = layout.panel(layout.k_columns, config.q_item_bytes)
    return Box(layout.q_rows, columns, IO_TYPES[config.dtype])


def k_box(plan: AttentionPlan) -> Box:
    """Of K: the keys that the CTA fetches, or those of them that one page holds."""
    layout, config = plan.layout, plan.config
    return Box(
        layout.box_keys(layout.k_rows), layout.panel(layout.k_columns), IO_TYPES[config.keys_dtype]
    )


def v_box(plan: AttentionPlan) -> Box:
    """Of V: the keys that the CTA fetches, or those of them that one page holds."""
    layout, config = plan.layout, plan.config
    return Box(
        layout.box_keys(layout.tile_n), layout.panel(layout.v_columns), IO_TYPES[config.keys_dtype]
    )


def o_box(plan: AttentionPlan) -> Box:
    """Of O: the same rows."""
    return Box(plan.layout.q_rows, plan.layout.o_panel, OUT_TYPES[plan.config.o_dtype])


def panel_at(layout: Tiles, box: Box, buffer: cute.Pointer, index: Int32) -> cute.Tensor:
    """The box of rows in panel `index` of query tiles: panels stand as far apart as all rows."""
    return shared(buffer + index * (layout.rows * box.columns), box.layout())
