"""Keys of a paged cache as boxes of TMA (device code)."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from kernelkit.device.boxes import Box, TmaTensor
from mla.attention.config import LatentConfig
from mla.attention.shared.work import HasWork


@dataclass(frozen=True)
class Key:
    """Place of a key in a paged cache, and the first column of a box of it."""

    row: Int32
    page: Int32
    column: Int32 | int


@cute.jit
def place_of(config: LatentConfig, scope: HasWork, key: Int32) -> tuple[Int32, Int32]:
    """Return (row, page) of a key. Past the last key the page does not exist: zeros arrive."""
    rows, source = config.keys.rows, scope.given.keys
    page = Int32(source.store.shape[0])
    if key < scope.work.keys:
        page = Int32(source.places[scope.work.entry, key // rows])
    return key % rows, page


@cute.jit
def partition_box(
    source: TmaTensor, box: Box, position: Key, target: cute.Tensor
) -> tuple[cute.Tensor, cute.Tensor]:
    """Return the views of one box for a TMA copy, in shared and in global memory."""
    moved = cute.domain_offset((position.row, position.column, 0), source.tensor)
    tile = cute.local_tile(moved, (box.rows, box.columns), (0, 0, position.page))
    return cpasync.tma_partition(
        source.atom,
        0,
        cute.make_layout(1),
        cute.group_modes(target, 0, 2),
        cute.group_modes(tile, 0, 2),
    )
