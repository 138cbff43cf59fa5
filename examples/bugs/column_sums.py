"""Sums of columns, tile by tile: one warp loads tiles by TMA, the other adds their rows up.

python -m ptxemu check column_sums.py
"""

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import from_dlpack
from cutlass.memory import SmemAllocator

TILES, ROWS, COLUMNS, STAGES = 5, 16, 32, 2
TILE_BYTES = ROWS * COLUMNS * 4


@cute.struct
class Storage:
    full: cute.struct.MemRange[cutlass.Int64, STAGES]
    empty: cute.struct.MemRange[cutlass.Int64, STAGES]
    tiles: cute.struct.Align[cute.struct.MemRange[cutlass.Float32, TILE_BYTES // 4 * STAGES], 128]


@cute.kernel
def kernel(atom: cute.CopyAtom, x: cute.Tensor, y: cute.Tensor, layout: cute.Layout) -> None:
    lane = cute.arch.lane_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    storage = SmemAllocator().allocate(Storage)
    full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
    ring = storage.tiles.get_tensor(layout)
    if warp == 0:
        with cute.arch.elect_one():
            for stage in cutlass.range_constexpr(STAGES):
                cute.arch.mbarrier_init(full + stage, 1)
                cute.arch.mbarrier_init(empty + stage, 32)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    tiles = cute.local_tile(x, (ROWS, COLUMNS), (None, 0))
    to, source = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(ring, 0, 2), cute.group_modes(tiles, 0, 2)
    )
    if warp == 0:
        for tile in cutlass.range(TILES, unroll=1):
            stage, phase = tile % STAGES, tile // STAGES % 2
            cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, TILE_BYTES)
            cute.copy(atom, source[None, tile], to[None, stage], tma_bar_ptr=full + stage)
    else:
        for tile in cutlass.range(TILES, unroll=1):
            stage, phase = tile % STAGES, tile // STAGES % 2
            cute.arch.mbarrier_wait(full + stage, phase)
            total = cutlass.Float32(0.0)
            for row in cutlass.range_constexpr(ROWS):
                total += ring[row, lane, stage]
            y[tile, lane] = total
            cute.arch.mbarrier_arrive(empty + stage)


@cute.jit
def host(x: cute.Tensor, y: cute.Tensor) -> None:
    layout = cute.make_layout((ROWS, COLUMNS, STAGES), stride=(COLUMNS, 1, ROWS * COLUMNS))
    load = cpasync.CopyBulkTensorTileG2SOp()
    atom, tensor = cpasync.make_tiled_tma_atom(
        load, x, cute.slice_(layout, (None, None, 0)), (ROWS, COLUMNS)
    )
    kernel(atom, tensor, y, layout).launch(grid=(1, 1, 1), block=(64, 1, 1))


def reference(x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"y": x.view(TILES, ROWS, COLUMNS).sum(1)}


def main() -> None:
    x = torch.arange(TILES * ROWS * COLUMNS, dtype=torch.float32, device="cuda").view(-1, COLUMNS)
    y = torch.zeros(TILES, COLUMNS, device="cuda")
    host(from_dlpack(x, assumed_align=16), from_dlpack(y))


if __name__ == "__main__":
    main()
