"""What TMA moves at a time (device code): lines of K of x and w, swizzled, and atoms of scale
factors as they are."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float4E2M1FN, Int32, Uint8, Uint16
from cutlass.cute.nvgpu import cpasync

from kernelkit.device.boxes import ROWS_FIRST, Box, TmaTensor, describe, reorder
from moe.formats import SCALE_ATOM_BYTES
from moe.sm100.plan import LINE, GroupedPlan

ATOM_WORDS = SCALE_ATOM_BYTES // 2


@dataclass(frozen=True)
class PlainBox(Box):
    """Lines behind each other, without a swizzle."""

    def layout(self) -> cute.Layout:
        """(rows, columns)."""
        return cute.make_layout((self.rows, self.columns), stride=(self.columns, 1))

    def at(self, buffer: cute.Pointer, index: Int32) -> cute.Tensor:
        """Box `index` of a buffer, (rows, columns)."""
        return cute.make_tensor(buffer + index * (self.rows * self.columns), self.layout())


def x_box(plan: GroupedPlan) -> Box:
    """A stage of x, in bytes."""
    return Box(plan.x_rows, LINE, Uint8)


def w_box(plan: GroupedPlan) -> Box:
    """A stage of w, in bytes."""
    return Box(plan.w_rows, LINE, Uint8)


def scale_box(plan: GroupedPlan) -> PlainBox:
    """The atoms of a group of stages for 128 rows, in 16-bit words: a line of a box has at most
    256."""
    return PlainBox(plan.group * plan.atoms, ATOM_WORDS, Uint16)


@cute.jit
def describe_w(operation: object, tensor: cute.Tensor, plan: GroupedPlan) -> TmaTensor:
    """The copy of boxes of w, as lines of bytes or as windows (`moe.config`) that are padded."""
    moved, box = reorder(tensor, ROWS_FIRST), w_box(plan)
    if cutlass.const_expr(not plan.pads_w):
        return describe(operation, moved, box)
    atom, coordinates = cpasync.make_tiled_tma_atom(
        operation,
        cute.recast_tensor(moved, Float4E2M1FN),
        box.layout(),
        (box.rows, box.columns),
        internal_type=Uint8,
    )
    return TmaTensor(atom, coordinates)
