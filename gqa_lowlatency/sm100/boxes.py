"""What TMA moves at a time: keys by one swizzled line of a piece, and how it lies in shared memory
(device code).

A piece is made of panels: all its keys, 128 bytes of each. K is the K-major A operand of S, V the
MN-major A operand of O^T, and both read this one arrangement. Boxes of a buffer follow each other
without gaps; rows and pages beyond the tensor arrive as zeros.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync, tcgen05

from gqa_lowlatency.device.signature import TYPES
from gqa_lowlatency.sm100.args import TmaTensor
from gqa_lowlatency.sm100.plan import Plan100
from gqa_lowlatency.sm100.products import shared

ATOM_ROWS = 8
ROWS_FIRST = (1, 3, 2, 0)  # [B, S, H, D] seen as (S, D, H, B); pages stand where B does


@dataclass(frozen=True)
class Box:
    """`rows` lines of `columns` elements."""

    rows: int
    columns: int
    element: type[cutlass.Numeric]

    def layout(self) -> cute.ComposedLayout:
        """(rows, columns) as TMA and the tensor core swizzle them."""
        wide = self.columns * self.element.width == 1024
        kind = tcgen05.SmemLayoutAtomKind.K_SW128 if wide else tcgen05.SmemLayoutAtomKind.K_SW64
        atom = tcgen05.make_smem_layout_atom(kind, self.element)
        if self.rows % ATOM_ROWS == 0:
            return cute.tile_to_shape(atom, (self.rows, self.columns), (0, 1))
        # Pages smaller than an atom. Lines follow each other in it, and what moves 16 bytes is
        # their address: several boxes make up an atom.
        lines = cute.make_layout((self.rows, self.columns), stride=(self.columns, 1))
        return cute.make_composed_layout(atom.inner, 0, lines)

    def at(self, buffer: cute.Pointer, index: Int32) -> cute.Tensor:
        """Box `index` of a buffer, (rows, columns)."""
        return shared(buffer + index * (self.rows * self.columns), self.layout())


def kv_box(plan: Plan100) -> Box:
    """Of K and V: the keys of a tile, or those of them that one page holds."""
    return Box(plan.box_rows, plan.panel, TYPES[plan.config.keys_dtype])


@cute.jit
def describe(plan: Plan100, tensor: cute.Tensor) -> TmaTensor:
    """The copy of boxes of K or V [B, S, H, D]."""
    box = kv_box(plan)
    rows_first = cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[*ROWS_FIRST]))
    atom, coordinates = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileG2SOp(), rows_first, box.layout(), (box.rows, box.columns)
    )
    return TmaTensor(atom, coordinates)


@cute.jit
def copy_in(
    source: TmaTensor, box: Box, position: tuple, target: cute.Tensor, barrier: cute.Pointer
) -> None:
    """Start one box at (key, column, head, entry); `barrier` counts its bytes."""
    row, column, head, entry = position
    moved = cute.domain_offset((row, column, 0, 0), source.tensor)
    tile = cute.local_tile(moved, (box.rows, box.columns), (0, 0, head, entry))
    to_shared, from_global = cpasync.tma_partition(
        source.atom,
        0,
        cute.make_layout(1),
        cute.group_modes(target, 0, 2),
        cute.group_modes(tile, 0, 2),
    )
    cute.copy(source.atom, from_global, to_shared, tma_bar_ptr=barrier)
