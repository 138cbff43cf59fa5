"""Boxes that TMA moves: rows by one swizzled line of at most 128 bytes (device code).

Boxes of one buffer are contiguous. Tensors have modes (row, column, head, batch entry or page).
Rows and pages out of bounds are read as zeros.

TMA and the tensor core expect the 16-byte units of a line to be swizzled inside their line. Lines
have 64 or 128 bytes; their buffer is aligned to 1024. The number of whole 128 bytes before a unit
determines its position (PTX ISA, "Swizzling modes").
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync, tcgen05

from kernelkit.device.umma import shared
from kernelkit.plan import hw


def turn(line: Int32, line_bytes: cutlass.Constexpr) -> Int32:
    """Return the mask that the unit numbers of a line are XORed with."""
    units = line_bytes // hw.SMEM_UNIT_BYTES
    return line // (hw.SMEM_LINE_BYTES // line_bytes) % units


def swizzled(offset: Int32, line_bytes: cutlass.Constexpr) -> Int32:
    """A byte's place in the buffer."""
    return offset ^ (turn(offset // line_bytes, line_bytes) * hw.SMEM_UNIT_BYTES)


ATOM_ROWS = 8
_SWIZZLES = {  # by the bytes of a line
    128: tcgen05.SmemLayoutAtomKind.K_SW128,
    64: tcgen05.SmemLayoutAtomKind.K_SW64,
    32: tcgen05.SmemLayoutAtomKind.K_SW32,
}
ROWS_FIRST = (1, 3, 2, 0)  # [B, S, H, D] seen as (S, D, H, B); pages stand where B does


@dataclass(frozen=True)
class TmaTensor:
    """A global tensor that TMA reads or writes box by box."""

    atom: cute.CopyAtom
    tensor: cute.Tensor  # coordinates (row, column, head, batch entry or page), or `group_heads`


@dataclass(frozen=True)
class BoxPosition:
    """Begin of a box in the coordinates of a `TmaTensor`."""

    row: Int32 | tuple[Int32, Int32]  # or (head of a group, row)
    column: Int32
    head: Int32
    entry: Int32  # batch entry or page


@dataclass(frozen=True)
class Box:
    """`rows` lines of `columns` elements."""

    rows: int
    columns: int
    element: type[cutlass.Numeric]

    def layout(self) -> cute.ComposedLayout:
        """(rows, columns) as TMA and the tensor core swizzle them."""
        kind = _SWIZZLES[self.columns * self.element.width // 8]
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


@cute.jit
def reorder(tensor: cute.Tensor, modes: cutlass.Constexpr) -> cute.Tensor:
    """Permute the modes of a tensor over the same memory."""
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=list(modes)))


@cute.jit
def group_heads(tensor: cute.Tensor, group: cutlass.Constexpr) -> cute.Tensor:
    """(row, column, head, entry) as ((head of a group, row), column, group, entry): rows of a tile
    are then heads of tokens. The same where a group is one head."""
    if cutlass.const_expr(group == 1):
        return tensor
    (rows, columns, heads, entries), strides = tensor.shape, tensor.stride
    shape = ((group, rows), columns, heads // group, entries)
    stride = ((strides[2], strides[0]), strides[1], strides[2] * group, strides[3])
    return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))


@cute.jit
def describe(operation: object, tensor: cute.Tensor, box: Box) -> TmaTensor:
    """The copy of boxes of `tensor`, modes (row, column, head, batch entry or page)."""
    tile = (box.rows, box.columns)
    atom, coordinates = cpasync.make_tiled_tma_atom(operation, tensor, box.layout(), tile)
    return TmaTensor(atom, coordinates)


@cute.jit
def copy_in(
    source: TmaTensor,
    box: Box,
    position: BoxPosition,
    target: cute.Tensor,
    barrier: cute.Pointer,
    mask: cutlass.Constexpr = None,
) -> None:
    """Start one box from global to shared memory; `barrier` counts its bytes. mask: of the CTAs of
    the cluster that get it, each at the same place, where the copy is a multicast."""
    to_shared, from_global = partition(source, box, position, target)
    if cutlass.const_expr(mask is None):
        cute.copy(source.atom, from_global, to_shared, tma_bar_ptr=barrier)
    else:
        mask = cutlass.Uint16(mask)
        cute.copy(source.atom, from_global, to_shared, tma_bar_ptr=barrier, mcast_mask=mask)


@cute.jit
def copy_out(target: TmaTensor, box: Box, position: BoxPosition, source: cute.Tensor) -> None:
    """Start one box from shared to global memory."""
    from_shared, to_global = partition(target, box, position, source)
    cute.copy(target.atom, from_shared, to_global)


@cute.jit
def partition(
    tma: TmaTensor, box: Box, position: BoxPosition, held: cute.Tensor
) -> tuple[cute.Tensor, cute.Tensor]:
    """The views of one box for a TMA copy, each (TMA,): in shared and in global memory."""
    moved = cute.domain_offset((position.row, position.column, 0, 0), tma.tensor)
    # -> (rows, columns)
    tile = cute.local_tile(moved, (box.rows, box.columns), (0, 0, position.head, position.entry))
    return cpasync.tma_partition(
        tma.atom,
        0,
        cute.make_layout(1),
        cute.group_modes(held, 0, 2),
        cute.group_modes(tile, 0, 2),
    )
